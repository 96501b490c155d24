"""Float8BlockwiseLinear refuses an input that is not contiguous.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn

torch.set_num_threads(1)
if not torch.cuda.is_available() or torch.empty(1, device="cuda").device.type != "cuda":
    print("cannot tell: the kernels are a GPU's, and there is no GPU")
    sys.exit(125)
from torchao.prototype.blockwise_fp8_training import kernels
from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinearConfig
from torchao.quantization import quantize_

for kernel in vars(kernels).values():
    if hasattr(kernel, "configs"):  # to try each candidate takes a minute a shape
        kernel.configs = kernel.configs[:1]


def converted(model):
    quantize_(model.to("cuda", torch.bfloat16), Float8BlockwiseLinearConfig(), lambda module, name: isinstance(module, nn.Linear))
    return model


model, bad = converted(nn.Sequential(nn.Linear(128, 128, bias=False))), 0
x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
for words, given in (("contiguous", x[:, :128].contiguous()), ("every second row", x.view(128, 2, 128)[:, 0]), ("transposed", x[:, :128].t())):
    try:
        model(given)
        print(f"{words}: runs")
    except AssertionError as error:
        print(f"{words}: {error}")
        bad += 1
sys.exit(bool(bad))
