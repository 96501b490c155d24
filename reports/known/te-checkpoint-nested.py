"""te.checkpoint inside a reentrant te.checkpoint: recomputed with other scales than the forward had.
"""
import os
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TE_ON_CPU_VERSION", "2.20.2")
import sys
from te_on_cpu.environment import enter
enter()
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

recipe = DelayedScaling(amax_history_len=4)


def train(nested):
    State.reset()
    torch.manual_seed(0)
    first, second = te.Linear(32, 32, bias=False), te.Linear(32, 32, bias=False)

    def inner(x):
        return te.checkpoint(first, x) if nested else first(x)

    for step in range(3):
        first.weight.grad = second.weight.grad = None
        x = torch.randn(32, 32).mul(8**step).cuda().requires_grad_()
        with te.autocast(enabled=True, recipe=recipe):
            y = te.checkpoint(lambda x: second(inner(x)), x)
        y.sum().backward()
    left = sum(len(queue) for queue in State.quantization_state.fp8_tensors_recompute_buffer)
    window = second.fp8_meta["scaling_fwd"].amax_history[:, 0]
    return second.weight.grad, window, left


plain, again = train(False), train(True)
print("second layer's history of x: ", [round(x, 4) for x in plain[1].tolist()], "without nesting")
print("                             ", [round(x, 4) for x in again[1].tolist()], "nested")
far = ((again[0] - plain[0]).norm() / plain[0].norm()).item()
print(f"second layer's gradient off by {far:.3g}, scales left in the stash {again[2]}; both must be 0")
sys.exit(1 if far or again[2] else 0)
