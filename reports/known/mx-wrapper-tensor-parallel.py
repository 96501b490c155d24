"""quantize_(MXFP8TrainingOpConfig), then parallelize_module: the linear multiplies in bf16, as if nothing had converted it.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

torch.set_num_threads(1)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
CONFIG = MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED)
WHOLE = {"colwise": ColwiseParallel(output_layouts=Replicate()),
         "rowwise": RowwiseParallel(input_layouts=Replicate())}


def results(*stages):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16))
    for stage in stages:
        stage(model)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    y = model(x)
    y.backward(torch.randn(32, 64, dtype=torch.bfloat16))
    grad = model[0].weight.grad
    return [t.float() for t in (y.detach(), x.grad, grad.full_tensor() if hasattr(grad, "full_tensor") else grad)]


def quantise(model):
    quantize_(model, CONFIG)


def shard(model):
    fully_shard(model, mesh=mesh["data"])


def parallel(style):
    return lambda model: parallelize_module(model, mesh["tensor"], {"0": WHOLE[style]})


plain, quantised, bad = results(), results(quantise), 0
runs = {f"quantize_, {style}": (quantise, parallel(style)) for style in WHOLE}
runs |= {f"{style}, quantize_": (parallel(style), quantise) for style in WHOLE}
runs |= {"quantize_, fully_shard": (quantise, shard)}
for name, stages in runs.items():
    got = results(*stages)
    same = [all(torch.equal(a, b) for a, b in zip(got, want)) for want in (plain, quantised)]
    print(f"{name:24} results of the unquantised model: {same[0]}, of the quantised one: {same[1]}")
    bad += name.startswith("quantize_") and same[0]
gap = max(((a - b).norm() / b.norm()).item() for a, b in zip(plain, quantised))
print(f"quantising changes the worst of output and gradients by {gap:.3f} of its norm")
sys.exit(bool(bad))
