"""With an amax_compute_algo of one's own, updates roll the amax history of layers that did not run."""
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

def largest(history):
    return history.amax(dim=0)

def run(algorithm):
    torch.manual_seed(0)
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=algorithm)
    expert, other = te.Linear(64, 64, bias=False), te.Linear(64, 64, bias=False)
    for size in (16, 1, None, None, None, 16):  # None: the expert gets no tokens
        x = torch.randn(64, 64, device="cuda") * (size or 1)
        history = [] if expert.fp8_meta.get("scaling_fwd") is None else (
            expert.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist())
        with autocast(recipe):
            other(x)
            if size:
                y = expert(x)
    return [round(v, 2) for v in history], far(y, x.double() @ expert.weight.double().T)

(kept, expected), (rolled, got) = run("max"), run(largest)
print("the expert's amax history before its last run")
print(f"amax_compute_algo='max':       {kept}; error of its next output {expected:.3g}")
print(f"the same as a function:        {rolled}; error of its next output {got:.3g}")
print(f"excess error {got - expected:.3g}")
sys.exit(1 if kept != rolled else 0)
