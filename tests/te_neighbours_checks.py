"""Run by test_te_neighbours.py in a process of its own: judges the cases of te_neighbours.json that
are of one version, each alone and beside a failure that is none of its entry's business. Prints a
line each: entry, "alone" or "beside", the entries that explained something, what was new."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from narrowfuzz.case.spec import load_case
from narrowfuzz.judge.judge import Judge, Judgement
from narrowfuzz.ledger.ledger import load_ledger
from narrowfuzz.machine.environment import prepare, settle
from narrowfuzz.plants.patching import attribute_replaced
from narrowfuzz.recipe.recipe import load_every
from narrowfuzz.rules import rules_of
from neighbours import Plantable, failure
from te_on_cpu.environment import chosen_version, enter

ROWS = json.loads(Path(__file__).with_name("te_neighbours.json").read_text())


@contextmanager
def forward_scales_doubled() -> Iterator[None]:
    """1.x: each update leaves the forward scales twice as large as its rule says."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as Manager

    def make(update: Any) -> Any:
        def updated(_: Any, *args: Any, **kwargs: Any) -> None:
            update(*args, **kwargs)
            for key, scales in Manager.global_scale_buffer.items():
                for scale in scales if key.startswith("forward") else ():
                    scale.mul_(2)

        return classmethod(updated)

    with attribute_replaced(Manager, "reduce_and_update_fp8_tensors", make):
        yield


def beside(named: str) -> Plantable:
    """What a row names as its failure: an error where the library raises that by itself, or
    "always"."""
    if named == "forward scales doubled":
        return forward_scales_doubled
    return failure(named.removeprefix("always "), always=named.startswith("always "))


def told(entry: str, how: str, found: Judgement) -> None:
    explained = sorted({verdict.explained_by for verdict in found.known})
    new = sorted({f"{v.rule} {v.role} {v.symptom}" for v in found.causes})
    print(json.dumps({"entry": entry, "how": how, "explained": explained, "new": new}), flush=True)


def main() -> None:
    prepare()
    enter()
    settle()
    recipes, ledger = load_every(), load_ledger()
    wanted = set(sys.argv[1:])
    for row in ROWS:
        if row["version"] != chosen_version() or (wanted and row["entry"] not in wanted):
            continue
        case = load_case(json.dumps(row["case"]).encode())
        # the crash that ends the case would take the blame for what this rule shows
        rule = [rules_of(case.spec)[row["rule"]]] if "rule" in row else None
        told(row["entry"], "alone", Judge(recipes, ledger).judge(case, rule))
        with beside(row["beside"])():
            told(row["entry"], "beside", Judge(recipes, ledger).judge(case, rule))


if __name__ == "__main__":
    main()
