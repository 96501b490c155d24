"""Float8ColwiseParallel under torch.compile: the backward raises where fully_shard of the linear ends its graph.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel

torch.set_num_threads(1)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))


def attempt(style, units, compiled):
    torch._dynamo.reset()
    _clear_sharding_prop_cache()  # another entry's: dtensor-graph-of-older-mesh
    model = nn.Sequential(nn.Linear(16, 32, bias=False))
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    parallelize_module(model, mesh["tensor"], {"0": style()})
    if units == "each linear":
        fully_shard(model[0], mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    call = torch.compile(model, backend="aot_eager") if compiled else model
    try:
        call(torch.randn(32, 16)).sum().backward()
    except Exception as error:
        said = " ".join(str(error).split())
        return f"{type(error).__name__}: {said[:90]} ... {said[-85:]}"
    return "ok"


bad = 0
for style in (ColwiseParallel, Float8ColwiseParallel):
    for units in ("the whole", "each linear"):
        for compiled in (False, True):
            got = attempt(style, units, compiled)
            print(f"{style.__name__}, fully_shard of {units}, compiled={compiled}: {got}")
            bad += compiled and "__coerce_same_metadata_as_tangent__" in got
sys.exit(bool(bad))
