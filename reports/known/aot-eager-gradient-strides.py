"""The backend aot_eager fails in the backward of an activation or a loss of a transposed view: its graph is
traced with other strides of the gradient than the kernels give it.
"""
import logging, os, sys, warnings
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

torch.set_num_threads(1)
torch.manual_seed(0)
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
heads = lambda x: x.view(2, 8, 2, 4).transpose(1, 2)
wanted, keys = torch.randn(2, 2, 8, 4), torch.randn(2, 2, 4, 8)
gradient, x = torch.randn(2, 2, 8, 4), heads(torch.randn(2, 8, 8))
elu = lambda gradient, x: torch.ops.aten.elu_backward(gradient, 1.0, 1.0, 1.0, False, x)
with FakeTensorMode() as mode:
    traced = elu(mode.from_tensor(gradient), mode.from_tensor(x)).stride()
print(f"strides of elu_backward: of its kernel {elu(gradient, x).stride()}, when traced {traced}")
cases = {
    "gelu, then a product": lambda x: F.gelu(heads(x)) @ keys,
    "elu, then a product": lambda x: F.elu(heads(x)) @ keys,
    "softplus, then a running sum": lambda x: F.softplus(heads(x)).cumsum(2),
    "mse_loss": lambda x: F.mse_loss(heads(x), wanted),
}
bad = 0
for name, f in cases.items():
    for backend in ("eager", "aot_eager"):
        x = torch.randn(2, 8, 8, requires_grad=True)
        try:
            torch.compile(f, backend=backend)(x).sum().backward()
            print(f"{name}, backend {backend}: runs")
        except RuntimeError as error:
            print(f"{name}, backend {backend}: {str(error).split(' (')[0]}")
            if backend == "eager" or "view size is not compatible" not in str(error):
                raise
            bad += 1
sys.exit(bool(bad))
