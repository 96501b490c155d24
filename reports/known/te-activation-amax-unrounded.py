"""Current scaling of an activation's output is by the maximum that the output had before it was rounded (2.7 on)."""
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
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.module import layernorm_mlp  # calls these functions
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

torch.manual_seed(0)
E4M3 = type(TE_DType[torch.bfloat16]).kFloat8E4M3
quantizer, bad = Float8CurrentScalingQuantizer(E4M3, torch.device("cuda")), 0
x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
for name in ("gelu", "silu", "swiglu"):
    activation = getattr(layernorm_mlp.tex, name)
    plain = activation(x, None)  # bf16
    fused, apart = activation(x, quantizer)._scale_inv.item(), quantizer(plain)._scale_inv.item()
    largest = plain.float().abs().max().item()
    print(f"{name}, whose largest output in bf16 is {largest}: 1/scale is {fused:.7g} from the activation, {apart:.7g} from the output")
    bad += fused != apart
sys.exit(1 if bad else 0)
