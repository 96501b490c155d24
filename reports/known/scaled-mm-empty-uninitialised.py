"""torch._scaled_mm with a contracted dimension of 0 returns memory that nobody wrote, on CPUs with AMX.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
SIZE, SENTINEL = 64, 7.0
one, kind = torch.ones(()), F.ScalingType.TensorWise
a = torch.zeros(SIZE, 0).to(torch.float8_e4m3fn)
b = torch.zeros(SIZE, 0).to(torch.float8_e4m3fn)


def poisoned(function):
    """Call it after memory of the result's size was filled with a sentinel and given back."""
    blocks = [torch.full((SIZE, SIZE), SENTINEL, dtype=torch.bfloat16) for _ in range(64)]
    del blocks
    return function()


def scaled_mm(bias):
    return torch._scaled_mm(a, b.t(), one, one, bias=bias, out_dtype=torch.bfloat16)


def rowwise(bias):
    scales = torch.ones(SIZE, 1), torch.ones(1, SIZE)
    return torch._scaled_mm(a, b.t(), *scales, bias=bias, out_dtype=torch.bfloat16)


def public(bias):
    return F.scaled_mm(a, b.t(), one, kind, one, kind, bias=bias, output_dtype=torch.bfloat16)


bad = untold = 0
if not torch.cpu.get_capabilities().get("amx_int8"):
    print("cannot tell: this CPU has no AMX, whose kernel it is")
    sys.exit(125)
for bias in (None, torch.arange(SIZE).to(torch.bfloat16)):
    want = F.linear(a.bfloat16(), b.bfloat16(), bias)
    for name, function in (("torch._scaled_mm, one scale", scaled_mm), ("torch._scaled_mm, rowwise", rowwise),
                           ("F.scaled_mm compiled", torch.compile(public))):
        try:
            function(bias)  # the first call compiles, or makes oneDNN's primitive
        except RuntimeError as error:  # torch 2.11 multiplies no rows on a CPU, and has no public one there
            untold += 1
            print(f"{name:27} bias {bias is not None!s:5}: cannot run here: {str(error).splitlines()[0]}")
            continue
        got = poisoned(lambda: function(bias))
        wrong = int((got != want).sum())
        found = int((got == SENTINEL).sum()) - int((want == SENTINEL).sum())
        print(f"{name:27} bias {bias is not None!s:5}: {wrong} of {got.numel()} elements wrong, "
              f"{found} hold the freed sentinel; first {got[0, :3].tolist()}, must be {want[0, :3].tolist()}")
        bad += wrong
sys.exit(1 if bad else 125 if untold else 0)
