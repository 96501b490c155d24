"""float8 rowwise: the scale promised to be rounded DOWN to a power of two is rounded UP.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
import math
from torchao.float8.float8_utils import amax_to_scale


torch.set_num_threads(1)
torch.manual_seed(0)
bad = 0
for e in (-20, -3, 0, 3, 4, 5, 6, 9, 10, 12, 60, 120):
    base = torch.tensor(1.75 * 2.0 ** e).view(torch.int32).item()
    wrong = []
    for ulp in range(-4, 64):                         # amax = 1.75 * 2^e plus a few fp32 steps
        amax = torch.tensor([[base + ulp]], dtype=torch.int32).view(torch.float32)
        raw = amax_to_scale(amax, torch.float8_e4m3fn, False).item()
        got = amax_to_scale(amax, torch.float8_e4m3fn, True).item()
        if got != 2.0 ** (math.frexp(raw)[1] - 1):    # floor of log2 without rounding
            wrong.append((ulp, got / raw))
    print(f"amax = 1.75*2^{e} + n ulp: scale rounded up for n = "
          f"{[w[0] for w in wrong[:1]]}..{[w[0] for w in wrong[-1:]]} ({len(wrong)} values)")
    bad += len(wrong)
print("seen from the layer: row amax one ulp above 1.75 (fp32)")
x = torch.full((1, 4), 1.0)
x[0, 0] = torch.nextafter(torch.tensor(1.75), torch.tensor(2.0))
x[0, 1] = 2.0 ** -17
s = amax_to_scale(x.abs().amax(-1, keepdim=True), torch.float8_e4m3fn, True)
print("  scale", s.item(), "rule 128.0; amax * scale =", (x[0, 0] * s).item(), "> 448")
q = (x * s).clamp(-448, 448).to(torch.float8_e4m3fn)
q2 = (x * 128).clamp(-448, 448).to(torch.float8_e4m3fn)
print("  dequantised", (q.float() / s)[0].tolist(), "rule", (q2.float() / 128)[0].tolist())
sys.exit(bool(bad))
