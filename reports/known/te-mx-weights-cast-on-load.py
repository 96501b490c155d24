"""Until 2.9: load_state_dict casts MXFP8 parameters anew, from what is left of them, to other codes and scales."""
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
from transformer_engine.common.recipe import MXFP8BlockScaling

def model():
    make = getattr(te, "quantized_model_init", None) or te.fp8_model_init  # until 2.8
    with make(enabled=True, recipe=MXFP8BlockScaling()):
        return te.Linear(256, 256, bias=False, params_dtype=torch.bfloat16)

torch.manual_seed(0)
saved, loaded, bad = model(), model(), 0
with torch.no_grad():
    saved.weight.copy_(torch.randn(256, 256, device="cuda"))
loaded.load_state_dict(saved.state_dict())
for side in ("rowwise", "columnwise"):
    for part in ("data", "scale_inv"):
        a, b = (getattr(m.weight, f"_{side}_{part}") for m in (saved, loaded))
        changed = (a != b).sum().item()
        print(f"{side} {part}: {changed} of {a.numel()} bytes changed")
        bad += changed
sys.exit(1 if bad else 0)
