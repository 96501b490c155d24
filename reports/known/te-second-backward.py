"""backward(retain_graph=True) frees what a second backward needs."""
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

torch.manual_seed(0)
bad = 0
for layer in (torch.nn.Linear(32, 32, device="cuda"), te.Linear(32, 32), te.LayerNormLinear(32, 32)):
    x = torch.randn(32, 32, device="cuda", requires_grad=True)
    y = layer(x)  # in high precision: FP8 has nothing to do with it
    y.sum().backward(retain_graph=True)
    try:
        y.sum().backward()
        print(type(layer).__module__.split(".")[0], type(layer).__name__, "runs backward twice, as asked")
    except Exception as error:
        bad += "retain_graph" not in str(error)  # that would be a refusal in words
        print(f"{type(layer).__name__}: {type(error).__name__}: {str(error)[:90]}")
sys.exit(1 if bad else 0)
