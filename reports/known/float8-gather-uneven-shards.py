"""float8 all-gather under fully_shard: a weight that the ranks do not share evenly kills the forward.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import threading
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

torch.set_num_threads(1)
threaded._install_threaded_pg()
torch._C._distributed_c10d._set_thread_isolation_mode(True)


def on_ranks(ranks, main):
    left, store = [None] * ranks, dist.HashStore()

    def run(rank):
        try:
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            left[rank] = main(rank)
        except BaseException as error:
            if not isinstance(error, SystemExit):
                left[rank] = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
            threaded.ProcessLocalGroup.exception_handle(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    threaded.ProcessLocalGroup.reset()
    return left


def attempt(k, n, ranks, codes, precomputes):
    def main(rank):
        model = nn.Sequential(nn.Linear(k, n, bias=False))
        convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=codes, emulate=True))
        fully_shard(model)
        if precomputes:
            precompute_float8_dynamic_scale_for_fsdp(model)
        y = model(torch.randn(16, k))
        y.backward(torch.ones_like(y))
        return "ok"

    return on_ranks(ranks, main)


bad = 0
for k, n, ranks, codes, precomputes in (
    (16, 2, 3, False, False), (16, 2, 3, True, False), (16, 2, 3, True, True),
    (16, 5, 2, False, False), (16, 5, 2, True, False), (16, 4, 2, True, True),
):
    got = attempt(k, n, ranks, codes, precomputes)
    print(f"Linear({k}, {n}) on {ranks} ranks, float8 all-gather={codes}, precomputed={precomputes}: {got}")
    bad += codes and n % ranks and any(one != "ok" for one in got)
sys.exit(bool(bad))
