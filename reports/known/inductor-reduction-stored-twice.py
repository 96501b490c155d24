"""torch.compile on a CPU of x.sum(0) and x.sum(0, keepdim=True) in bf16: C++ that declares a name twice."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import logging
logging.disable(logging.CRITICAL)
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
CASES = {
    "sum, first axis": lambda x: (x.sum(0), x.sum(0, keepdim=True)),
    "amax, first axis": lambda x: (x.amax(0), x.amax(0, keepdim=True)),
    "sum, last axis": lambda x: (x.sum(1), x.sum(1, keepdim=True)),
}
bad = ran = 0
for name, function in CASES.items():
    for dtype in (torch.float32, torch.bfloat16):
        torch._dynamo.reset()
        x = torch.randn(64, 64, dtype=dtype)
        try:
            one, other = torch.compile(function)(x)
            ran += 1
            print(f"{name}, {dtype}: compiles, equal {torch.equal(one, other.reshape(-1))}")
        except Exception as error:
            said = [line for line in str(error).splitlines() if "conflicting declaration" in line]
            print(f"{name}, {dtype}: {type(error).__name__}: {(said or str(error).splitlines())[0][-90:]}")
            bad += bool(said)
if not ran:  # no compiler
    print("cannot tell: nothing compiles here")
    sys.exit(125)
sys.exit(1 if bad else 0)
