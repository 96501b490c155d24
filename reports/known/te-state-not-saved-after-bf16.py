"""A forward outside autocast before saving loses all scales."""
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

os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"  # 2.x asks for it to load scales

def step(layer, number):
    """Error of the weight gradient of one training step."""
    torch.manual_seed(number)
    x, target = torch.randn(2, 256, 256, device="cuda")
    with autocast(DelayedScaling(amax_history_len=4)):
        y = layer(x)
    layer.weight.grad = None
    y.retain_grad()
    (y - target).square().mean().backward()
    return round(far(layer.weight.grad, y.grad.double().T @ x.double()), 4)

def resume(validate):
    """What is loaded, and the errors of three steps after it."""
    torch.manual_seed(0)
    layer, resumed = te.Linear(256, 256, bias=False), te.Linear(256, 256, bias=False)
    for number in range(3):
        step(layer, number)
    if validate:
        with torch.no_grad():
            layer(torch.randn(256, 256, device="cuda"))  # in high precision
    resumed.load_state_dict(layer.state_dict())
    state = resumed.fp8_meta.get("scaling_bwd")
    scale = "no scale" if state is None else f"gradient scale {state.scale[0].item():.6g}"
    return scale, [step(resumed, number) for number in (3, 4, 5)]

(loaded, expected), (lost, got) = resume(False), resume(True)
print("saved after a training step:         ", loaded, "loaded, errors of three steps", expected)
print("saved after a high-precision forward:", lost, "loaded, errors of three steps", got)
print(f"excess error {got[0] - expected[0]:.3g} in the first step")
sys.exit(1 if loaded != lost else 0)
