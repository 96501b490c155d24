"""Float8ColwiseParallel and Float8RowwiseParallel: bias.grad is the sum of output gradients that were cast to E5M2.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

torch.set_num_threads(1)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))


def bias_gradient(style):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    if style is not None:
        parallelize_module(model, mesh, {"0": style})
    y = model(torch.randn(256, 64))
    grad = torch.randn(256, 64)
    y.backward(grad)
    got = model[0].bias.grad
    return grad.sum(0), got.full_tensor() if hasattr(got, "full_tensor") else got


bad = 0
for name, style in (
    ("one process", None),
    ("ColwiseParallel", ColwiseParallel(output_layouts=Replicate())),
    ("RowwiseParallel", RowwiseParallel(input_layouts=Replicate())),
    ("Float8ColwiseParallel", Float8ColwiseParallel(output_layouts=Replicate())),
    ("Float8RowwiseParallel", Float8RowwiseParallel(input_layouts=Replicate())),
):
    want, got = bias_gradient(style)
    error = ((got - want).norm() / want.norm()).item()
    print(f"{name:22} bias.grad is off by {error:.2e} of its norm")
    bad += name.startswith("Float8") and error > 1e-3
sys.exit(bool(bad))
