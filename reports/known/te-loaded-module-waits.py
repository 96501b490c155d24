"""A module that was loaded and has not run since is left out of updates of gradient scales."""
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

def step(*layers):
    """One training step, a loss and a backward for each branch; error of the last weight gradient."""
    x, target = torch.randn(2, 256, 256, device="cuda")
    with autocast(DelayedScaling(amax_history_len=4)):
        outputs = [layer(x) for layer in layers]
    for layer, y in zip(layers, outputs):
        layer.weight.grad = None
        y.retain_grad()
        (y - target).square().mean().backward()
    return far(layers[-1].weight.grad, y.grad.double().T @ x.double())

def train(resume):
    """Both branches run, then the first, then the second."""
    torch.manual_seed(0)
    layers, loaded = ([te.Linear(256, 256, bias=False) for _ in "12"] for _ in "12")
    step(*layers)
    for one, other in zip(layers, loaded):
        other.load_state_dict(one.state_dict())
    first, second = loaded if resume else layers
    step(first)
    scale = second.fp8_meta["scaling_bwd"].scale[0].item()
    return scale, step(second)

(scale, expected), (stale, got) = train(False), train(True)
print(f"uninterrupted: gradient scale of the second branch {scale:.6g}, error of its weight gradient {expected:.3g}")
print(f"resumed:       gradient scale of the second branch {stale:.6g}, error of its weight gradient {got:.3g}")
print(f"excess error {got - expected:.3g} in one step")
sys.exit(1 if scale != stale else 0)
