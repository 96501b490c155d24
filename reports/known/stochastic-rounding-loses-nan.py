"""torchao's stochastic rounding to bf16 makes -0 of a GPU's NaN: a NaN gradient sets weights to zero in silence.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torchao.optim
from torchao.optim.quant_utils import _fp32_to_bf16_sr

torch.set_num_threads(1)
torch.compiler.set_stance("force_eager")  # each step is compiled otherwise; the numbers are the same
bad = 0
for bits in (0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF):  # NaN: a CPU's, a GPU's, and another
    nan = torch.full((4096,), bits - (bits >> 31 << 32), dtype=torch.int32).view(torch.float32)
    rounded = _fp32_to_bf16_sr(nan)
    print(f"NaN of the bits {bits:#x}: {int(rounded.isnan().sum())} of 4096 stay NaN, others are {rounded[~rounded.isnan()][:1].tolist()}")
    bad += not rounded.isnan().all()
if torch.cuda.is_available() and torch.empty(1, device="cuda").device.type == "cuda":
    for kind in (torchao.optim.AdamW8bit, torchao.optim.AdamW4bit, torchao.optim.AdamWFp8, torchao.optim._AdamW):
        p = torch.nn.Parameter(torch.ones(4096, device="cuda", dtype=torch.bfloat16))
        optimizer = kind([p], lr=1e-3, bf16_stochastic_round=True)
        p.grad = torch.full_like(p, torch.inf)  # inf / inf is NaN
        optimizer.step()
        print(f"{kind.__name__} on a GPU after a step with an infinite gradient: {int(p.isnan().sum())} NaN, weights {p[:2].tolist()}")
        bad += not p.isnan().any()
sys.exit(bool(bad))
