"""2.4 to 2.17: parameters in FP8 blocks, and the bias beside them, get no gradient from a forward outside autocast."""
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
def cannot(kind, error, trace):
    print(f"cannot run: {kind.__name__}: {error}", flush=True)
    os._exit(125)
sys.excepthook = cannot
import torch
if not torch.cuda.is_available():  # elsewhere TransformerEngine's own extension runs
    os.environ.setdefault("TE_ON_CPU_VERSION", "2.17.1")
    from te_on_cpu.environment import enter
    enter()
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling

bad = 0
for quantised in (False, True):
    torch.manual_seed(0)
    with te.fp8_model_init(enabled=quantised, recipe=Float8BlockScaling()):
        layer = te.Linear(128, 128, params_dtype=torch.bfloat16)
    x = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    missing = [name for name, parameter in layer.named_parameters() if parameter.grad is None]
    print("parameters in FP8 blocks:" if quantised else "parameters in bf16:", f"no gradient of {missing}" if missing else "gradients of all")
    bad += bool(missing)
sys.exit(1 if bad else 0)
