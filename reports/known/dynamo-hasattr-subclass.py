"""torch.compile: hasattr says of a tensor subclass that it has none of its methods, and the other branch is compiled."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.set_num_threads(1)
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,))


def asks(weight, x):
    return x + 1 if hasattr(weight, "to_local") else x - 1


def takes(weight, x):
    return x - 1 if getattr(weight, "to_local", None) is None else x + 1


def tells(weight, x):
    return x + 1 if isinstance(weight, DTensor) else x - 1


weight = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)]))
found = {}
for function in (tells, asks, takes):
    functions = function, torch.compile(function, backend="eager")
    found[function] = [one(weight, torch.zeros(1)).item() for one in functions]
    print(f"{function.__name__}: eager {found[function][0]}, compiled {found[function][1]}")
dist.destroy_process_group()
if found.pop(tells) != [1.0, 1.0] or any(eager != 1.0 for eager, _ in found.values()):
    print("cannot tell: eager takes the other branch, too")
    sys.exit(125)
sys.exit(any(compiled != 1.0 for _, compiled in found.values()))
