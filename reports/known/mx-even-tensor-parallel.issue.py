import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = init_device_mesh("cpu", (1,))
weight = distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)])
for mode in ScaleCalculationMode:
    try:
        MXTensor.to_mx(weight, torch.float8_e4m3fn, scaling_mode=mode)
        print(f"{mode.name}: ok")
    except RuntimeError as error:
        print(f"{mode.name}: {str(error).splitlines()[0][:90]}")
