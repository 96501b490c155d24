"""autocast inside a reentrant te.checkpoint: forward scales stay at 1 for ever."""
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
def cannot(kind, error, trace):
    print(f"cannot run: {kind.__name__}: {error}", flush=True)
    os._exit(125)
sys.excepthook = cannot
import torch
if not torch.cuda.is_available():  # elsewhere TransformerEngine's own extension runs
    os.environ.setdefault("TE_ON_CPU_VERSION", "2.20.2")
    from te_on_cpu.environment import enter
    enter()
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

def autocast(recipe, enabled=True):
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)  # what 1.x calls it

def far(got, truth):
    return ((got.double() - truth).norm() / truth.norm()).item()

def train(reentrant, weights=1.0):
    torch.manual_seed(0)
    layer, recipe = te.Linear(512, 512, bias=False), DelayedScaling(amax_history_len=4)
    with torch.no_grad():
        layer.weight.mul_(weights)

    def block(x):
        with autocast(recipe):
            return layer(x)

    for _ in range(4):
        x = torch.randn(512, 512, device="cuda", requires_grad=True)
        y = te.checkpoint(block, x, use_reentrant=reentrant)
        y.sum().backward()
    return layer.fp8_meta["scaling_fwd"].scale[:2].tolist(), far(y, x.double() @ layer.weight.double().T)

bad = 0
for weights, what in ((1.0, "default weights"), (0.1, "weights a tenth of that")):
    try:
        (scales, expected), (stuck, got) = train(False, weights), train(True, weights)
    except KeyError as error:  # 1.x
        print("backward raises KeyError:", error)
        sys.exit(1)
    print(f"{what}, 4 steps: scales of x and weight {scales}, error {expected:.3g};")
    print(f"  use_reentrant=True: {stuck}, error {got:.3g}; excess {got - expected:.3g}")
    bad += stuck == [1.0, 1.0]
sys.exit(1 if bad else 0)
