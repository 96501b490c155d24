"""torch.nn.functional.linear_cross_entropy in chunks has gradients of NaN where every target is ignored.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
x, w, bad = torch.randn(8, 16), torch.randn(32, 16), 0
ignored = torch.full((8,), -100)
for words, options in (("whole", None), ("in chunks", torch.nn.LinearCrossEntropyOptions())):
    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    torch.nn.functional.linear_cross_entropy(a, b, ignored, options=options).backward()
    lost = [int(t.grad.isnan().sum()) for t in (a, b)]
    print(f"{words}: NaN in {lost[0]} of {a.numel()} elements of the input's gradient, in "
          f"{lost[1]} of {b.numel()} of the weight's")
    bad += sum(lost)
sys.exit(bool(bad))
