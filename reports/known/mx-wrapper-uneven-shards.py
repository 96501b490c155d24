"""MXFP8TrainingOpConfig's and Float8TrainingOpConfig's weights under fully_shard: rows that the ranks do not share evenly raise on the short rank.
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
from torchao.prototype.moe_training.config import Float8TrainingOpConfig, MXFP8TrainingOpConfig
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

torch.set_num_threads(1)
RANKS = 3
dist.init_process_group("fake", rank=RANKS - 1, world_size=RANKS, store=FakeStore())
mesh = init_device_mesh("cpu", (RANKS,))


CONFIGS = (None, MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED), Float8TrainingOpConfig())


def attempt(rows, config):
    model = nn.Sequential(nn.Linear(32, rows, bias=False, dtype=torch.bfloat16))
    if config:
        quantize_(model, config)
    fully_shard(model, mesh=mesh)
    try:
        model.unshard()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:110]}"
    return "ok"


bad = 0
for rows in (96, 64):
    for config in CONFIGS:
        got = attempt(rows, config)
        print(f"{rows} rows on {RANKS} ranks, {type(config).__name__}: {got}")
        bad += "unevenly sharded" in got
sys.exit(bool(bad))
