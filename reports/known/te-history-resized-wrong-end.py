"""A shorter amax_history_len keeps the oldest maxima and drops the newest."""
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

def step(layer, size, length):
    x = torch.randn(64, 64, device="cuda") * size
    with autocast(DelayedScaling(amax_history_len=length)):
        return x, layer(x)

def run(length):
    torch.manual_seed(0)
    layer = te.Linear(64, 64, bias=False)
    for size in (1, 1, 1, 16):  # activations have just grown
        step(layer, size, 4)
    resumed = te.Linear(64, 64, bias=False)  # without saving and loading the next region raises
    resumed.load_state_dict(layer.state_dict())
    for _ in range(2):
        x, y = step(resumed, 16 if _ else 1, length)
    history = resumed.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist()
    return [round(v, 3) for v in history], far(y, x.double() @ resumed.weight.double().T)

(old, expected), (new, got) = run(4), run(3)
print("amax history of x with 4 cells:", old, f"error {expected:.3g}")
print("resumed with 3 cells:          ", new, f"error {got:.3g}; excess {got - expected:.3g}")
sys.exit(1 if got > 2 * expected else 0)
