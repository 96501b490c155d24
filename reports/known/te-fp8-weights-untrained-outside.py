"""1.11, 1.12: FP8 parameters get no gradient from a forward outside fp8_autocast."""
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
def cannot(kind, error, trace):
    print(f"cannot run: {kind.__name__}: {error}", flush=True)
    os._exit(125)
sys.excepthook = cannot
import torch
if not torch.cuda.is_available():  # elsewhere TransformerEngine's own extension runs
    os.environ.setdefault("TE_ON_CPU_VERSION", "1.12.0")
    from te_on_cpu.environment import enter
    enter()
import transformer_engine.pytorch as te

bad = 0
for quantised in (False, True):
    torch.manual_seed(0)
    with te.fp8_model_init(enabled=quantised):
        layer = te.Linear(32, 32, bias=False)
    x = torch.randn(32, 32, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    missing = layer.weight.grad is None
    print("parameters in FP8:" if quantised else "parameters in fp32:", "no gradient" if missing else "gradient")
    bad += missing
sys.exit(1 if bad else 0)
