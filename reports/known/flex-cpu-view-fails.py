"""torch.compile on a CPU fails where flex_attention's operands are views of other shapes, as after a linear.
"""
import logging, os, sys, warnings
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch.nn.attention.flex_attention import flex_attention

torch.set_num_threads(1)
torch.manual_seed(0)
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
to_q, to_k, to_v = (torch.nn.Linear(32, 32) for _ in range(3))


def attends(x):
    q, k, v = (to(x).view(1, 8, 2, 16).transpose(1, 2) for to in (to_q, to_k, to_v))
    return flex_attention(q, k, v)


x, bad = torch.randn(1, 8, 32), 0
with torch.no_grad():
    eager = attends(x)
    try:
        compiled = torch.compile(attends)(x)
        print("compiles; equals eager:", torch.allclose(compiled, eager, atol=1e-5))
    except Exception as error:
        bad = "not enough values to unpack" in str(error)
        print(f"eager runs; compiled: {type(error).__name__}: {str(error).splitlines()[0]}")
        if not bad:
            raise
sys.exit(bool(bad))
