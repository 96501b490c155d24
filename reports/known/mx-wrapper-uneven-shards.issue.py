import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
from torchao.quantization import quantize_

dist.init_process_group("fake", rank=2, world_size=3, store=FakeStore())  # the last of three ranks
mesh = init_device_mesh("cpu", (3,))
for rows in (96, 64):
    for convert in (False, True):
        model = nn.Sequential(nn.Linear(32, rows, bias=False, dtype=torch.bfloat16))
        if convert:
            quantize_(model, MXFP8TrainingOpConfig())
        fully_shard(model, mesh=mesh)
        try:
            model.unshard()
            print(f"{rows} rows, converted {convert}: ok")
        except AssertionError as error:
            print(f"{rows} rows, converted {convert}: {str(error).splitlines()[0]}")
