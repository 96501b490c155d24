"""The overhead of ``watch`` in a training: two blocks of width 512, 4 x 128 tokens, bf16, eager."""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import narrowfuzz
import torch
from torch import nn
from watch_model import Model

STEPS = 20
#: The most that the default mode may add, in per cent.
MOST = 10.0


def overhead_part(steps: int = STEPS) -> dict[str, float]:
    """Median milliseconds of CPU time of the only thread per step: plain, watched, and watched with
    digests (``full``). The three alternate step by step; waits do not count, as the machine is
    shared."""
    torch.manual_seed(0)
    model: nn.Module = Model(512, heads=8).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(4, 128, 512, dtype=torch.bfloat16)

    def step() -> float:
        start = time.thread_time()
        loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return 1e3 * (time.thread_time() - start)

    spent: dict[str, list[float]] = {"plain": [], "watched": [], "full": []}
    step()
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(steps):
            for how, times in spent.items():
                out = Path(folder) / f"{how}-{turn}"
                watched = narrowfuzz.watch(out=out, full=how == "full")
                with nullcontext() if how == "plain" else watched:
                    times.append(step())
    return {how: statistics.median(times) for how, times in spent.items()}
