"""te.checkpoint: a recompute takes the scales of the oldest forward that still waits, not its own."""
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

def region(layer, x, checkpointed):
    with autocast(DelayedScaling(amax_history_len=4)):
        return te.checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)

def train(checkpointed, unused):
    """Weight gradient of the last of eight steps, and the exact one."""
    torch.manual_seed(0)
    layer = te.Linear(64, 64, bias=False)
    for _ in range(unused):  # the output is in no loss
        region(layer, torch.randn(64, 64, device="cuda", requires_grad=True), checkpointed)
    for step in range(8):  # activations grow, by half in each step
        x = (torch.randn(64, 64, device="cuda") * 1.5**step).requires_grad_()
        y = region(layer, x, checkpointed)
        layer.weight.grad, dy = None, torch.randn_like(y)
        y.backward(dy)
    return layer.weight.grad, dy.double().T @ x.double()

def together(checkpointed):
    """Weight gradient of one backward through two forwards, the second's input 16 times as large."""
    torch.manual_seed(0)
    layer = te.Linear(64, 64, bias=False)
    xs = [(torch.randn(64, 64, device="cuda") * 16**i).requires_grad_() for i in range(2)]
    sum(region(layer, x, checkpointed) for x in xs).sum().backward()
    return layer.weight.grad

shown = not torch.equal(together(False), together(True))
print("one backward through two forwards:", "other" if shown else "the same", "gradient under te.checkpoint")
for unused in (0, 1, 4):
    (plain, truth), (again, _) = train(False, unused), train(True, unused)
    expected, got = far(plain, truth), far(again, truth)
    print(f"{unused} forwards unused, then 8 steps: error {expected:.3g}, under te.checkpoint {got:.3g};"
          f" excess {got - expected:.3g}")
    shown |= not torch.equal(plain, again)
sys.exit(1 if shown else 0)
