"""float8: empty batch (0 tokens), in_features 0 or out_features 0 die with bare torch errors; nn.Linear accepts them.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import dataclasses
import warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training, Float8LinearConfig


def f8(lin, recipe, emulate):
    cfg = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    return convert_to_float8_training(nn.Sequential(lin), config=cfg)[0]


def attempt(name, m, x):
    try:
        y = m(x)
    except Exception as e:
        return f"{name}: FORWARD {type(e).__name__}: {' '.join(str(e).split())[:120]}"
    try:
        y.backward(torch.ones_like(y))
    except Exception as e:
        return f"{name}: BACKWARD {type(e).__name__}: {' '.join(str(e).split())[:120]}"
    return f"{name}: ok"


torch.set_num_threads(1)
torch.manual_seed(0)
bad = 0
for recipe in ("tensorwise", "rowwise"):
    for emulate in (False, True):
        for M, K, N in ((0, 64, 32), (32, 0, 32), (32, 64, 0)):
            for dt in (torch.float32, torch.bfloat16):
                x = torch.zeros(M, K, dtype=dt, requires_grad=True)
                plain = attempt("", nn.Linear(K, N, dtype=dt), x)
                r = attempt(f"{recipe} emulate={emulate} {dt} tokens={M} in={K} out={N}",
                            f8(nn.Linear(K, N, dtype=dt), recipe, emulate), x)
                print(r, "| nn.Linear", plain)
                bad += not r.endswith(": ok")
sys.exit(bool(bad))
