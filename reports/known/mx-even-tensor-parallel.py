"""MXFP8Linear with ScaleCalculationMode.EVEN under tensor parallelism: the forward raises; the other modes run.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

torch.set_num_threads(1)
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))


def attempt(mode, style):
    linear = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    linear.__class__ = MXFP8Linear
    vars(linear).update(kernel_preference=KernelPreference.EMULATED, scale_calculation_mode=mode, wgrad_with_hp=False)
    model = parallelize_module(nn.Sequential(linear), mesh, {"0": style()})
    features = 32 if style is RowwiseParallel else 64
    try:
        model(torch.randn(32, features, dtype=torch.bfloat16)).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:110]}"
    return "ok"


bad = 0
for mode in (Mode.FLOOR, Mode.CEIL, Mode.RCEIL, Mode.EVEN):
    for style in (ColwiseParallel, RowwiseParallel):
        got = attempt(mode, style)
        print(f"{mode.name} {style.__name__}: {got}")
        bad += mode is Mode.EVEN and got != "ok"
sys.exit(bool(bad))
