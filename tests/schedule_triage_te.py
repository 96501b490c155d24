"""Triage of a schedule on TransformerEngine, in a process of its own: FOLDER -> its report."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from narrowfuzz.case.events import (
    Backward,
    Close,
    Forward,
    Open,
    Settings,
    Step,
)
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.recipe.recipe import load_every
from narrowfuzz.report.store import Store
from narrowfuzz.triage.triage import triage

LARGE = Spec(
    recipe="te.delayed", model="library_layernorm_linear", m=48, k=64, bias=True, dtype="fp32",
    events=(
        Open(), Forward(shift=3), Forward(), Forward(first=True), Close(),
        Backward(of=(0, 1)), Backward(of=(2,), values="spike"), Step(),
        Open(), Forward(), Forward(), Close(), Backward(of=(3,)), Backward(of=(4,), shift=-4),
        Step(),
        Open(), Forward(values="zero"), Forward(), Close(), Backward(of=(5, 6)), Step(),
        Open(), Forward(), Close(), Backward(of=(7,)), Step(),
    ),
    checkpoint="reentrant",
    depth=3,
    settings=Settings(history=3, algorithm="most_recent"),
)  # fmt: skip


def main(folder: str) -> None:
    """Judge, triage the backward's state, store."""
    torch.set_num_threads(1)
    judge = Judge(load_every(), Ledger([]))
    case = Case(spec=LARGE, data=DataSpec(seed=5))
    judgement = judge.judge(case)
    wanted = [v for v in judgement.causes if v.symptom == "backward scale not updated"]
    result = triage(judge, case, wanted[0])
    Store(Path(folder)).add(result.finding, result.script)


if __name__ == "__main__":
    main(sys.argv[1])
