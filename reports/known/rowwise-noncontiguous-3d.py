"""float8 rowwise: a 3-D input that cannot be flattened as a view fails; tensorwise accepts it.
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
cases = {
    "3-D contiguous": lambda: torch.randn(2, 32, 64),
    "(T,B,K).transpose(0,1)": lambda: torch.randn(32, 2, 64).transpose(0, 1),
    "(B,K,T).transpose(1,2)": lambda: torch.randn(2, 64, 32).transpose(1, 2),
}
for recipe in ("tensorwise", "rowwise"):
    for emulate in (False, True):
        for dt in (torch.float32, torch.bfloat16):
            for name, make in cases.items():
                x = make().to(dt).requires_grad_()
                r = attempt(f"{recipe} emulate={emulate} {dt} {name}",
                            f8(nn.Linear(64, 32, dtype=dt), recipe, emulate), x)
                print(r)
                bad += not r.endswith(": ok")
sys.exit(bool(bad))
