"""torch.compile: what is compiled for a DTensor of one tensor subclass is run for DTensors of another, without an error."""
import os, sys, tempfile
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp()}
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.set_num_threads(1)
aten = torch.ops.aten


class Doubled(torch.Tensor):
    """Stands for twice what it holds."""

    factor = 2.0

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held):
        self.held = held

    def __tensor_flatten__(self):
        return ["held"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func in (aten.view.default, aten.detach.default, aten.alias.default):
            return cls(func(args[0].held, *args[1:]))
        args = [t.held * cls.factor if isinstance(t, Doubled) else t for t in args]
        return func(*args, **(kwargs or {}))


class Tripled(Doubled):
    """Three times."""

    factor = 3.0


dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
mesh, wrong = init_device_mesh("cpu", (1,)), False
for kind in (Doubled, Tripled):
    torch._dynamo.reset()  # as the next process begins, with the same cache on disk
    x = DTensor.from_local(kind(torch.ones(2)), mesh, [Shard(0)])
    plus_one = lambda x: x + 1
    eager, compiled = (f(x).to_local()[0].item() for f in (plus_one, torch.compile(plus_one)))
    print(f"DTensor of {kind.__name__}, plus 1: eager {eager}, compiled {compiled}")
    wrong = wrong or compiled != eager
dist.destroy_process_group()
sys.exit(wrong)
