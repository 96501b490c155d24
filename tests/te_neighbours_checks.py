"""Run by test_te_neighbours.py in a process of its own: judges the cases of te_neighbours.json that
are of one version, each alone and beside a failure that is none of its entry's business. Prints a
line each: entry, "alone" or "beside", the entries that explained something, what was new."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from narrowfuzz.case.spec import load_case
from narrowfuzz.judge.judge import Judge, Judgement
from narrowfuzz.ledger.ledger import load_ledger
from narrowfuzz.machine.environment import prepare, settle
from narrowfuzz.plants.patching import replaced
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.recipe.recipe import load_every
from narrowfuzz.rules import rules_of
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

    with replaced(Manager, "reduce_and_update_fp8_tensors", make):
        yield


@contextmanager
def failing_otherwise(where: str, error: str) -> Iterator[None]:
    """Where ``module:function`` or ``module:Class.method`` raises ``error``, it raises that with
    another message, seen in the library's file: the same failure for another reason."""
    module, _, path = where.partition(":")
    home = importlib.import_module(module)
    *of, name = path.split(".")
    owner: Any = getattr(home, of[0]) if of else home
    original = getattr(owner, name)
    source = (
        f"def {name}(*args, **kwargs):\n    try:\n        return original(*args, **kwargs)\n"
        f"    except {error}:\n        raise {error}('planted') from None"
    )
    scope: dict[str, Any] = {**vars(home), "original": original}
    exec(compile(source, str(home.__file__), "exec"), scope)
    bound = hasattr(original, "__self__")  # a class method, which asks for no other self
    fails = staticmethod(scope[name]) if bound else scope[name]
    # a function is held by each module that imported it
    others = [] if of else [m for m in list(sys.modules.values()) if m is not None]
    holders = [owner, *(m for m in others if m is not home and vars(m).get(name) is original)]
    with ExitStack() as stack:
        for holder in holders:
            stack.enter_context(replaced(holder, name, lambda _: fails))
        yield


def beside(failure: str) -> Callable[[], AbstractContextManager[object]]:
    """``FAULT``, ``forward scales doubled``, or ``ERROR in module:function``."""
    if failure == "forward scales doubled":
        return forward_scales_doubled
    if " in " in failure:
        error, _, where = failure.partition(" in ")
        return lambda: failing_otherwise(where, error)
    return builtin_faults()[failure].plant


def told(entry: str, how: str, found: Judgement) -> None:
    explained = sorted({verdict.explained_by for verdict in found.known})
    new = sorted({f"{v.oracle} {v.role} {v.symptom}" for v in found.causes})
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
