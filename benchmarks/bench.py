"""``make bench``: narrowfuzz's promised speeds, each with its target and whether it is met.

Every part runs in a fresh, single-threaded process; nothing else of ours runs meanwhile. Exit code
0: all targets met; 1: one or more missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness.environment import describe, prepare, settle

HEADLINE = "torchao.float8.rowwise"
CORE = ("contract", "O1", "O2", "O3", "O4", "O5", "O6", "O7", "O15")
STAGES = ("draw", "data", "build", "run tapped", "run untapped", "reference", "rules", "rest")
PARTS = ("eager", "recipes", "inductor", "aot_eager", "start", "memory")
AT_CASES = (1_000, 5_000, 10_000, 20_000)


def eager_part(seconds: float) -> dict[str, Any]:
    """Cases a second of the headline recipe, beside raw PyTorch, and where the time goes."""
    from eager import breakdown, rate
    from harness.recipe import load_recipes
    from plain_hypothesis import raw_torch

    recipe = load_recipes()[HEADLINE]
    rate(recipe, number=0)  # warm up
    rounds: list[dict[str, Any]] = []
    until = time.perf_counter() + seconds
    while len(rounds) < 3 or time.perf_counter() < until:
        found = rate(recipe, number=len(rounds) + 1)
        found["raw"] = raw_torch({HEADLINE: recipe}, found["specs"], found["draws"], build_each=True)
        found["raw_once"] = raw_torch(
            {HEADLINE: recipe}, found["specs"], found["draws"], build_each=False
        )
        rounds.append(found)
    return {
        "rounds": len(rounds),
        "cases": sum(r["cases"] for r in rounds),
        **{k: [r[k] for r in rounds] for k in ("rate", "raw", "raw_once")},
        "ms": breakdown(recipe, number=1),
    }
