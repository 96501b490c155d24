"""MX RCEIL: ceil(log2(amax/448)) in fp32 gives a scale byte one too small just above 448*2^k.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode
from torchao.prototype.mx_formats.mx_tensor import to_mx


torch.set_num_threads(1)
torch.manual_seed(0)
bad = 0
for e in (-100, -20, -3, 0, 3, 4, 11, 12, 60, 120):
    base = torch.tensor(1.75 * 2.0 ** e).view(torch.int32).item()
    wrong = []
    for ulp in range(-4, 64):                         # amax = 1.75 * 2^e plus a few fp32 steps
        amax = torch.tensor(base + ulp, dtype=torch.int32).view(torch.float32)
        x = torch.full((1, 32), amax.item())
        byte = to_mx(x, torch.float8_e4m3fn, 32, Mode.RCEIL)[0].view(torch.uint8).item()
        want = (e - 8 if ulp <= 0 else e - 7) + 127   # smallest E with amax <= 448 * 2^E
        if byte != want:
            wrong.append(ulp)
    print(f"amax = 1.75*2^{e} + n ulp: wrong byte (rule - 1) for n = {wrong[:1]}..{wrong[-1:]} ({len(wrong)} values)")
    bad += len(wrong)
x = torch.full((1, 32), 1.75 * 2.0 ** -8, dtype=torch.bfloat16) * 1.0078125
print("bf16 never hits this: significands near 1.75 are 2^-7 apart;", x[0, 0].item())
sys.exit(bool(bad))
