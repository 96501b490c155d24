"""A weight cached by a forward without gradients keeps the transpose of before for the backward."""
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
def cannot(kind, error, trace):
    print(f"cannot run: {kind.__name__}: {error}", flush=True)
    os._exit(125)
sys.excepthook = cannot
import torch
if not torch.cuda.is_available():  # elsewhere TransformerEngine's own extension runs
    os.environ.setdefault("TE_ON_CPU_VERSION", "1.10.0")
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

def train(grad):
    """Errors of the input's gradient in three steps; without ``grad``, later steps cache the weight in
    an evaluation, and train their one microbatch with the cached weight."""
    torch.manual_seed(0)
    layer, errors = te.Linear(256, 256, bias=False), []
    for number in range(3):
        x, look, dy = torch.randn(3, 256, 256, device="cuda")
        x.requires_grad_()
        with autocast(DelayedScaling(amax_history_len=4)):
            with torch.set_grad_enabled(grad or number == 0):
                layer(look, is_first_microbatch=True)
        with autocast(DelayedScaling(amax_history_len=4)):
            y = layer(x, is_first_microbatch=False)
        y.backward(dy)
        errors.append(round(far(x.grad, dy.double() @ layer.weight.double()), 4))
        with torch.no_grad():
            layer.weight += 0.1 * layer.weight.abs().max() * torch.randn_like(layer.weight)
    return errors

expected, got = train(True), train(False)
print("cached by a forward with gradients: errors of the input's gradient", expected)
print("cached under no_grad:               errors of the input's gradient", got)
print(f"excess error {got[-1] - expected[-1]:.3g}")
sys.exit(1 if got[-1] > 2 * expected[-1] else 0)
