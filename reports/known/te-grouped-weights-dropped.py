"""Until 2.9: GroupedLinear's backward drops its weights' columns if a forward without gradients came in between."""
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
def cannot(kind, error, trace):
    print(f"cannot run: {kind.__name__}: {error}", flush=True)
    os._exit(125)
sys.excepthook = cannot
import torch
if not torch.cuda.is_available():  # elsewhere TransformerEngine's own extension runs
    os.environ.setdefault("TE_ON_CPU_VERSION", "2.9.0")
    from te_on_cpu.environment import enter
    enter()
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

def autocast(recipe):
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=recipe)
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe)  # what 2.8 and older call it

bad = 0
for make in (recipes.DelayedScaling, recipes.Float8CurrentScaling, recipes.MXFP8BlockScaling, recipes.Float8BlockScaling):
    for between in (False, True):
        layer = te.GroupedLinear(2, 128, 128, bias=False, params_dtype=torch.bfloat16)
        x = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with autocast(make()):
            y = layer(x, [128, 128])
            if between:
                with torch.no_grad():
                    layer(x, [128, 128])
        try:
            y.sum().backward()
            outcome = "ok"
        except RuntimeError as error:
            outcome = f"RuntimeError: {str(error).splitlines()[0]}"
        print(f"{make.__name__}, a forward under no_grad in between: {between}: {outcome}")
        bad += between and outcome != "ok"
sys.exit(1 if bad else 0)
