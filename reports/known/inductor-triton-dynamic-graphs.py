"""Inductor: torchao's blockwise FP8 linear dies when compiled with dynamic=True.
"""
import logging, os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torchao.prototype.blockwise_fp8_training import kernels
from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinearConfig
from torchao.quantization import quantize_

torch.set_num_threads(1)
logging.disable(logging.CRITICAL)
for kernel in vars(kernels).values():  # one candidate of each, which need not be timed
    if hasattr(kernel, "configs"):
        kernel.configs = kernel.configs[:1]
model = torch.nn.Sequential(torch.nn.Linear(128, 256, bias=False, device="cuda", dtype=torch.bfloat16))
quantize_(model, Float8BlockwiseLinearConfig(), lambda module, name: isinstance(module, torch.nn.Linear))
model[0].use_triton = True
x = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16)
right = model(x)
for dynamic in (False, True):
    torch.compiler.reset()
    try:
        with torch.no_grad():
            print(f"dynamic={dynamic}: as eager:", torch.equal(torch.compile(model, dynamic=dynamic)(x), right))
    except Exception as error:
        import traceback
        found = any(f.name == "replace_by_example" for f in traceback.extract_tb((error.__cause__ or error).__traceback__))
        print(f"dynamic={dynamic}: raises", type(error).__name__, "in replace_by_example:", found)
        if dynamic and found:
            sys.exit(1)
