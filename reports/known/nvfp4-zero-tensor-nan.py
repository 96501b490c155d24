"""NVFP4 of a tensor of zeros is NaN: a zero-initialised layer, quantised, returns NaN."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization import quantize_

torch.set_num_threads(1)
torch.manual_seed(0)
zeros = torch.zeros(16, 32)
tensor = NVFP4Tensor.to_nvfp4(zeros, per_tensor_scale=per_tensor_amax_to_scale(zeros.abs().max()))
print("to_nvfp4(zeros).dequantize():", tensor.dequantize()[0, :3].tolist())
bad = tensor.dequantize().isnan().any()
for dtype in (torch.bfloat16, torch.float32):
    model = nn.Sequential(nn.Linear(32, 16, bias=False, dtype=dtype))
    nn.init.zeros_(model[0].weight)
    x = torch.randn(4, 32, dtype=dtype)
    before = model(x)
    quantize_(model, NVFP4WeightOnlyConfig())
    print(dtype, "before:", before[0, :3].tolist(), "quantised:", model(x)[0, :3].tolist())
    bad |= model(x).isnan().any()
sys.exit(bool(bad))
