"""float8 real kernel under inductor (CPU): one token (or one feature) crashes the compiler; eager runs it.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
import tempfile
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp())
import logging
logging.disable(logging.CRITICAL)
import dataclasses
import warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training, Float8LinearConfig


def f8(lin, recipe, emulate):
    cfg = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    return convert_to_float8_training(nn.Sequential(lin), config=cfg)[0]



torch.set_num_threads(1)
torch.manual_seed(0)
bad = untold = 0
for recipe, dt in (("tensorwise", torch.float32), ("rowwise", torch.bfloat16)):
    for emulate, M, K, N in ((False, 1, 64, 32), (False, 32, 1, 32), (False, 2, 64, 32), (True, 1, 64, 32)):
        torch._dynamo.reset()
        m = f8(nn.Linear(K, N, bias=False, dtype=dt), recipe, emulate)
        x = torch.randn(M, K).to(dt).requires_grad_()
        try:
            m(x).sum().backward()              # eager is fine
        except RuntimeError as error:          # but torch 2.11 multiplies no rows on a CPU
            untold += 1
            print(f"{recipe:10} emulate={emulate!s:5} {dt}: cannot run here: {error}")
            continue
        try:
            torch.compile(m, backend="inductor", dynamic=False)(x).sum().backward()
            r = "ok"
        except Exception as e:
            t = " ".join(str(e).split())
            i = t.find("RuntimeError")
            r = type(e).__name__ + ": " + t[max(i, 0):max(i, 0) + 75]
            bad += 1
        print(f"{recipe:10} emulate={emulate!s:5} {dt} tokens={M} in={K} out={N}: {r}")
sys.exit(1 if bad else 125 if untold else 0)
