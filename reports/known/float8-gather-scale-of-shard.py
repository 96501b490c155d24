"""Float8 all-gather on a mesh of FSDP and tensor parallel: on the fly, each tensor-parallel rank scales its own shard; precomputed, all take the whole weight's scale.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import logging
import threading
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

logging.disable(logging.WARNING)  # of two all-reduces where one would do
torch.set_num_threads(1)
torch.manual_seed(0)
WEIGHT = torch.randn(64, 32)
WEIGHT[0, 0] = 30.0
left, store, errors = {}, dist.HashStore(), []
threaded._install_threaded_pg()
torch._C._distributed_c10d._set_thread_isolation_mode(True)


def run(rank):
    try:
        dist.init_process_group("threaded", rank=rank, world_size=4, store=store)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model = nn.Sequential(nn.Linear(32, 64, bias=False))
        with torch.no_grad():
            model[0].weight.copy_(WEIGHT)
        convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
        shard = model[0].weight._local_tensor
        on_the_fly = shard.fsdp_pre_all_gather(mesh["data"])[1][0].item()
        precompute_float8_dynamic_scale_for_fsdp(model)
        left[rank] = on_the_fly, shard.fsdp_pre_all_gather(mesh["data"])[1][0].item()
    except BaseException as error:
        errors.append(error)
        threaded.ProcessLocalGroup.exception_handle(error)


threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
if errors:
    raise errors[0]
whole = 448.0 / WEIGHT.abs().max().item()
for rank in range(4):
    print(f"rank {rank}: scale on the fly {left[rank][0]:.4f}, precomputed {left[rank][1]:.4f}; the whole weight's {whole:.4f}")
sys.exit(any(a != b for a, b in left.values()))
