"""Inductor: a Triton kernel that is called with a torch.dtype dies when compiled.
"""
import logging, os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import triton
import triton.language as tl

torch.set_num_threads(1)
logging.disable(logging.CRITICAL)


@triton.jit
def copy_kernel(x, y, n, dtype: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + places, tl.load(x + places, mask=places < n), mask=places < n)


def copied(x):
    y = torch.empty_like(x)
    copy_kernel[(triton.cdiv(x.numel(), 128),)](x, y, x.numel(), x.dtype, 128)
    return y


x = torch.randn(512, device="cuda", dtype=torch.bfloat16)
print("eager is right:", torch.equal(copied(x), x))
try:
    print("compiled is right:", torch.equal(torch.compile(copied)(x), x))
except Exception as error:
    found = "name 'torch' is not defined" in str(error)
    print("compiled raises", type(error).__name__, "name 'torch' is not defined:", found)
    sys.exit(found)
