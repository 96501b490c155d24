"""Float8ColwiseParallel under torch.compile: the backward raises where a graph ends right behind the linear.
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


class Block(nn.Module):
    """A forward of its own that calls the linear, and more behind it."""

    def __init__(self):
        super().__init__()
        self.add_module("0", nn.Linear(16, 32, bias=False))

    def forward(self, x):
        return self.get_submodule("0")(x).relu()


def attempt(style, make, sharded, compiled):
    torch._dynamo.reset()
    _clear_sharding_prop_cache()  # another entry's: dtensor-graph-of-older-mesh
    model = make()
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    parallelize_module(model, mesh["tensor"], {"0": style()})
    for name in sharded:
        fully_shard(model.get_submodule(name), mesh=mesh["data"])
    if compiled is not None:
        model.get_submodule(compiled).compile(backend="aot_eager")
    try:
        model(torch.randn(32, 16)).sum().backward()
    except Exception as error:
        said = " ".join(str(error).split())
        return f"{type(error).__name__}: {said[:78]} ... {said[-55:]}"
    return "ok"


bad = 0
for style in (ColwiseParallel, Float8ColwiseParallel):
    for make in (lambda: nn.Sequential(nn.Linear(16, 32, bias=False)), Block):
        for sharded in ((), ("",), ("0", "")):
            for compiled in (None, "", "0"):  # nothing, the model, the linear itself
                got, what = attempt(style, make, sharded, compiled), {None: "nothing", "": "model", "0": "linear"}
                print(f"{style.__name__} in {type(make()).__name__}, fully_shard of {sharded}, compiled: {what[compiled]}: {got}")
                bad += "__coerce_same_metadata_as_tangent__" in got
sys.exit(bool(bad))
