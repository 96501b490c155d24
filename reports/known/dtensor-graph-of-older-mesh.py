"""A compiled module that returns a DTensor is not compiled where its device mesh was made anew."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import tempfile
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

torch.set_num_threads(1)
store = dist.FileStore(tempfile.mktemp(), 2)
rank = 1 if os.fork() == 0 else 0
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)


def run(batch, mesh, compiled):
    torch._dynamo.reset()
    up, down = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.GELU(), nn.Linear(4, 8, bias=False))
    model = parallelize_module(model, mesh, {"0": up, "2": down})
    call = torch.compile(model, backend="aot_eager") if compiled else model
    try:
        y = call(torch.randn(batch, 2, 8, requires_grad=True))
        y.backward(DTensor.from_local(torch.ones_like(y.to_local()), y.device_mesh, y.placements))
        return "ok"
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"


def three(mesh):
    return [run(2, mesh(), False), run(3, mesh(), False), run(3, mesh(), True)]


kept = init_device_mesh("cpu", (2,))
one = three(lambda: kept)
_clear_sharding_prop_cache()
anew = three(lambda: init_device_mesh("cpu", (2,)))
dist.destroy_process_group()
if rank:
    os._exit(0)
os.wait()
print("eager, eager on another batch, compiled; one mesh for all:", one)
print("the same; an equal mesh made anew for each:", anew)
sys.exit("was invalid, but is output" in anew[2] and one[2] == "ok")
