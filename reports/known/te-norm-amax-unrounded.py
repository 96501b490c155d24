"""2.7 to 2.9: current scaling of a norm's output is by the maximum that the output had before it was rounded."""
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
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.module._common import apply_normalization
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

torch.manual_seed(0)
BF16 = TE_DType[torch.bfloat16]
quantizer, bad = Float8CurrentScalingQuantizer(type(BF16).kFloat8E4M3, torch.device("cuda")), 0
x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
ones = torch.ones(256, device="cuda", dtype=torch.bfloat16)
for name, bias in (("LayerNorm", ones * 0), ("RMSNorm", None)):
    def norm(by):
        return apply_normalization(x, None, ones, bias, 1e-5, by, BF16, name, 0, False)[0]
    plain = norm(None)
    fused, apart = norm(quantizer)._scale_inv.item(), quantizer(plain)._scale_inv.item()
    largest = plain.float().abs().max().item()
    print(f"{name}, whose largest output in bf16 is {largest}: 1/scale is {fused:.7g} from the norm, {apart:.7g} from the output")
    bad += fused != apart
sys.exit(1 if bad else 0)
