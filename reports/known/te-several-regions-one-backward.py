"""One backward through forwards of two regions changes gradient scales in its middle."""
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

def train():
    torch.manual_seed(0)
    recipe, scales, hs, ys = DelayedScaling(amax_history_len=4), [], [], []
    first, second = te.Linear(64, 64, bias=False), te.Linear(64, 64, bias=False)

    def scale(*_):  # called as soon as second's backward of one microbatch is done
        scales.append(second.fp8_meta["scaling_bwd"].scale[0].item())

    for step in range(2):
        hs, ys = [], []
        for _ in range(2):
            x = torch.randn(64, 64, device="cuda", requires_grad=True)
            with autocast(recipe):
                hs.append(first(x))
                ys.append(second(hs[-1]))
            hs[-1].register_hook(scale)
        second.weight.grad, dys = None, [torch.randn_like(y) for y in ys]
        scales.clear()
        torch.autograd.backward(ys, dys)  # one loss over both microbatches
    truth = sum(dy.double().T @ h.double() for h, dy in zip(hs, dys))
    return scales, far(second.weight.grad, truth)

scales, error = train()
print("gradient scale of the second layer for each microbatch of one backward:", scales)
print(f"error of its weight gradient {error:.3g}")
sys.exit(1 if scales[0] != scales[1] else 0)
