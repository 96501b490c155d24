"""bf16 x @ w.t() on a CPU with AMX: a NaN or Inf in one row of x makes the row before it NaN."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import math
import torch

torch.set_num_threads(1)
torch.manual_seed(0)


def victims(rows, columns, k, bad, multiply):
    """Rows of the result that are not finite although their row of x is."""
    x, w = torch.randn(rows, k).bfloat16(), torch.randn(columns, k).bfloat16()
    x[5] = bad
    y = multiply(x, w)
    return [i for i in range(rows) if i != 5 and not y[i].isfinite().all()]


def mm(x, w):
    return x @ w.t()


def linear_autocast(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        return torch.nn.functional.linear(x.float(), w.float())


def of_a_slice(k):
    """How many rows are not finite of x[:, :k] @ w.t(), all finite, where NaN lie behind in x."""
    x = torch.cat([torch.randn(64, k), torch.full((64, k), float("nan"))], 1).bfloat16()
    y = x[:, :k] @ torch.randn(64, k).bfloat16().t()
    return int((~y.isfinite()).any(1).sum())


def grad_input(x, w):  # x is the output's gradient
    u = torch.zeros(x.shape[0], w.shape[0], dtype=x.dtype, requires_grad=True)
    torch.nn.functional.linear(u, w.t().contiguous()).backward(x)
    return u.grad


if not torch.cpu.get_capabilities().get("amx_bf16"):
    print("cannot tell: this CPU has no AMX, whose kernel it is")
    sys.exit(125)
print("oneDNN says which kernel runs:")
with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
    victims(64, 64, 33, float("nan"), mm)
sys.stdout.flush()
bad = 0
for multiply in (mm, linear_autocast, grad_input):
    for value in (float("nan"), float("inf")):
        found = {k: rows for k in range(1, 131) if (rows := victims(64, 64, k, value, multiply))}
        rule = [k for k in range(2, 131) if k % (2 * math.ceil(k / 32))]
        print(f"{multiply.__name__}, row 5 {value}: row(s) {sorted({r for v in found.values() for r in v})} not finite "
              f"for {len(found)} of 130 K: {list(found)[:12]} ...; as the rule says: {list(found) == rule}")
        bad += len(found)
found = {k: rows for k in range(1, 131) if (rows := of_a_slice(k))}
print(f"a slice, NaN behind it: up to {max(found.values(), default=0)} of 64 rows not finite for {len(found)} of 130 K")
sys.exit(1 if bad + len(found) else 0)
