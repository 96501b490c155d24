"""LayerNormMLP's weights that a forward without gradients cached in FP8 blocks fail a later backward; Linear's do not."""
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
def cannot(kind, error, trace):
    print(f"cannot run: {kind.__name__}: {error}", flush=True)
    os._exit(125)
sys.excepthook = cannot
import torch
if not torch.cuda.is_available():  # elsewhere TransformerEngine's own extension runs
    os.environ.setdefault("TE_ON_CPU_VERSION", "2.14.1")
    from te_on_cpu.environment import enter
    enter()
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling, MXFP8BlockScaling

def region(recipe):
    if hasattr(te, "autocast"):
        return te.autocast(recipe=recipe)
    return te.fp8_autocast(fp8_recipe=recipe)  # until 2.8

def without_gradients(forward, x):
    with torch.no_grad():
        forward(x)

def in_a_checkpoint(forward, x):
    te.checkpoint(forward, x)

def train(recipe, layer, first):
    torch.manual_seed(0)
    made = layer(32, 32, params_dtype=torch.bfloat16, device="cuda")
    x = torch.ones(32, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with region(recipe):
        first(lambda x: made(x, is_first_microbatch=True), x)
        y = made(x, is_first_microbatch=False)
    y.sum().backward()

shown = False
for recipe, layer in (
    (MXFP8BlockScaling(), te.LayerNormMLP), (Float8BlockScaling(), te.Linear), (Float8BlockScaling(), te.LayerNormMLP)
):
    for first in (without_gradients, in_a_checkpoint):
        words = f"{type(recipe).__name__}, {layer.__name__}, first forward {first.__name__.replace('_', ' ')}"
        try:
            train(recipe, layer, first)
            print(f"{words}: the later backward runs")
        except RuntimeError as error:
            if layer is not te.LayerNormMLP:
                raise
            shown = True
            print(f"{words}: the later backward must run, too, got {error}")
sys.exit(1 if shown else 0)
