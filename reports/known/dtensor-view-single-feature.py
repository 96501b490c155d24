"""A linear with one feature and one token, or none, dies under tensor parallelism, on one rank and on two; alone it runs."""
import os, sys, tempfile
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

torch.set_num_threads(1)
store = dist.FileStore(tempfile.mktemp(), 2)
rank = 1 if os.fork() == 0 else 0
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
ONE, TWO = DeviceMesh("cpu", [rank]), init_device_mesh("cpu", (2,))
WHOLE = {RowwiseParallel: {"input_layouts": Replicate()}, ColwiseParallel: {"output_layouts": Replicate()}}


def attempt(linear, x, style, mesh):
    model = parallelize_module(linear, mesh, style(**WHOLE[style]))
    try:
        model(x).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
    return "ok"


cases = [(1, 8, True, (2, 1, 1)), (1, 8, True, (2, 4, 1)), (2, 8, True, (2, 1, 2)), (0, 8, True, (2, 4, 0)), (0, 8, True, (4, 0))]
cases = [(RowwiseParallel, *case) for case in cases]
cases += [(ColwiseParallel, 3, features, bias, (4, 3)) for features, bias in ((1, True), (1, False), (2, True))]
bad, lines = 0, []
for style, features, out, bias, shape in cases:
    nn.Linear(features, out, bias=bias)(torch.randn(shape)).sum().backward()
    told = [attempt(nn.Linear(features, out, bias=bias), torch.randn(shape), style, mesh) for mesh in (ONE, TWO)]
    lines.append(f"nn.Linear({features}, {out}, bias={bias}) of {list(shape)} under {style.__name__}: on 1 rank {told[0]}; on 2 {told[1]}")
    bad += any("remove or reshape sharded dimension" in one for one in told)
dist.destroy_process_group()
if rank:
    os._exit(0)
os.wait()
print("\n".join(lines))
sys.exit(bool(bad))
