"""float8 rowwise, real kernel: grad GEMMs multiply by a_inv*b_inv, which overflows: NaN from finite data.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import dataclasses
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training, Float8LinearConfig


def f8(lin, recipe, emulate):
    cfg = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    return convert_to_float8_training(nn.Sequential(lin), config=cfg)[0]


torch.set_num_threads(1)
torch.manual_seed(0)
bad = 0
for dt in (torch.float32, torch.bfloat16):
    for p in (60, 70, 74, 80):                         # amax_a * amax_b > about 2^145 is enough
        out = {}
        for emulate in (True, False):
            lin = nn.Linear(16, 16, bias=False, dtype=dt)
            with torch.no_grad():
                lin.weight.zero_()
                lin.weight[0, :] = 1.0                 # contraction of grad_input runs over rows of weight
                lin.weight[1, :] = 2.0 ** p
            m = f8(lin, "rowwise", emulate)
            x = torch.zeros(16, 16, dtype=dt, requires_grad=True)
            g = torch.zeros(16, 16, dtype=dt)
            g[:, 0] = 2.0 ** p
            m(x).backward(g)
            out[emulate] = x.grad[0, 0].item()
        print(f"{dt} p={p}: exact 2^{p}={2.0 ** p:.4g}; emulated {out[True]}, real {out[False]}")
        bad += out[False] != out[False]
sys.exit(bool(bad))
