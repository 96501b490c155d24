"""MXFP8TrainingOpConfig's weights under fully_shard: rows that the ranks do not share evenly raise on the short rank.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

torch.set_num_threads(1)
RANKS = 3
dist.init_process_group("fake", rank=RANKS - 1, world_size=RANKS, store=FakeStore())
mesh = init_device_mesh("cpu", (RANKS,))


def attempt(rows, quantised):
    model = nn.Sequential(nn.Linear(32, rows, bias=False, dtype=torch.bfloat16))
    if quantised:
        quantize_(model, MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED))
    fully_shard(model, mesh=mesh)
    try:
        model(torch.randn(32, 32, dtype=torch.bfloat16)).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:110]}"
    return "ok"


bad = 0
for rows in (96, 64):
    for quantised in (False, True):
        got = attempt(rows, quantised)
        print(f"{rows} rows on {RANKS} ranks, quantised={quantised}: {got}")
        bad += quantised and "unevenly sharded" in got
sys.exit(bool(bad))
