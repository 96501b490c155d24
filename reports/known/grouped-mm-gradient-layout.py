"""torch.nn.functional.grouped_mm: a backward whose gradient is expanded, as that of .sum() is, or transposed raises.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
offs = torch.tensor([3, 8], dtype=torch.int32)
bad = 0
for title, of in (("y.sum()", lambda y: y.sum()), ("(y * 1).sum()", lambda y: (y * 1).sum())):
    x = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(2, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    loss = of(torch._grouped_mm(x, w, offs=offs))
    try:
        loss.backward()
        parts = [x.detach()[:3].t() @ torch.ones(3, 32).bfloat16(), x.detach()[3:].t() @ torch.ones(5, 32).bfloat16()]
        print(f"{title}.backward() runs, with the right gradients: {torch.allclose(w.grad, torch.stack(parts))}")
    except RuntimeError as error:
        bad += title == "y.sum()" and "strides" in str(error)
        print(f"{title}.backward() raises: {str(error).splitlines()[0]}")
y = torch._grouped_mm(torch.randn(6, 16).bfloat16().requires_grad_(), w, offs=torch.tensor([3, 6], dtype=torch.int32))
try:
    y.backward(torch.ones(32, 6).bfloat16().t())
    print("a transposed gradient runs")
except RuntimeError as error:
    bad += "strides" in str(error)
    print(f"a transposed gradient of 6 rows raises: {str(error).splitlines()[0]}")
a, b = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
(a @ b).sum().backward()
print("(a @ b).sum().backward() runs")
sys.exit(bool(bad))
