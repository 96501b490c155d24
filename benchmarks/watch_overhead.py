"""What watching costs a training: a two-block model of width 512, 4 x 128 tokens, bf16, eager."""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path

import narrowfuzz
import torch
from torch import nn
from watch_model import Model

STEPS = 20
#: The most that the default mode may add, in per cent.
MOST = 10.0


def overhead_part() -> dict[str, float]:
    """Milliseconds a step, without watch, with it, and with digests: the three take turns."""
    torch.manual_seed(0)
    model: nn.Module = Model(512, heads=8).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(4, 128, 512, dtype=torch.bfloat16)

    def step() -> float:
        start = time.perf_counter()
        loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return 1e3 * (time.perf_counter() - start)

    spent: dict[str, list[float]] = {"plain": [], "watched": [], "full": []}
    with tempfile.TemporaryDirectory() as folder:
        step()
        for turn in range(STEPS // 4):
            for how, times in spent.items():
                out = Path(folder) / f"{how}-{turn}"
                with ExitStack() as around:
                    around.enter_context(
                        nullcontext()
                        if how == "plain"
                        else narrowfuzz.watch(out=out, full=how == "full")
                    )
                    step()
                    times += [step() for _ in range(4)]
    return {how: statistics.median(times) for how, times in spent.items()}
