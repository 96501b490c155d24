"""Does a fault change anything, and is everything as before once it is lifted?

Looks at what runs leave: results, gradients, codes, scales, state, errors, and what a conversion
changed. A campaign that finds nothing says something only of a fault that does something.
"""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing as mp
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from narrowfuzz.case import Case, Compile, Spec
from narrowfuzz.device import choose, enter
from narrowfuzz.environment import settle
from narrowfuzz.judge import Judge
from narrowfuzz.ledger import Ledger
from narrowfuzz.plants.registry import find_plant
from narrowfuzz.recipe import Recipe, load_every, of_kind, runnable
from narrowfuzz.stateful import Stateful
from narrowfuzz.strategies import cases, often, rarely, schedule_cases

#: A look at so many cases of each kind tells whether a fault was lifted; so many, whether it is
#: there at all.
LIFTED, THERE = 4, 60
#: Compiled ones are dear.
_COMPILED_THERE = 6
_SECONDS = 300.0


@dataclasses.dataclass(frozen=True)
class Look:
    """Three looks at the same cases."""

    problem: str
    #: Planted, something was otherwise.
    changes: bool


def observe(
    file: str,
    fault_id: str,
    recipes: Sequence[str],
    device: str,
    *,
    cases: int,
    compiled: bool = False,
) -> Look:
    """Plant a fault in a process of its own on its device, and lift it again."""
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_observe, args=(file, fault_id, tuple(recipes), device, cases, compiled, theirs)
    )
    process.start()
    theirs.close()
    try:
        answer: Look = (
            ours.recv() if ours.poll(_SECONDS) else Look(f"no answer in {_SECONDS:.0f} s", True)
        )
    except EOFError:  # a fault may end the process it is planted in: that shows
        answer = Look("", True)
    if process.is_alive():
        process.kill()
    process.join()
    return answer


def _observe(
    file: str,
    fault_id: str,
    recipes: tuple[str, ...],
    device: str,
    number: int,
    compiled: bool,
    out: Connection,
) -> None:
    choose(device)
    settle()
    where = enter(device)
    every = load_every()
    known, stateful = of_kind(every, Recipe), of_kind(every, Stateful)
    models = [r for n in recipes if n in known and (r := runnable(known[n], where.torch))]
    playing = [stateful[n] for n in recipes if n in stateful]
    for recipe in playing:
        recipe.prepare()
    ladders = rarely if device == "cpu" else often
    drawn = draw(models, playing, number, "none", ladders)
    if compiled:
        drawn += draw(models, [], min(number, _COMPILED_THERE), "inductor")

    def seen() -> str:
        judge = Judge(known, Ledger([]), device=where, stateful=stateful)
        return digest([judge.run_arms(case) for case in drawn])

    before = seen()
    fault = find_plant(file, fault_id)
    try:
        planted = fault.plant()
        planted.__enter__()
    except Exception as error:  # noqa: BLE001 - told to the user
        out.send(Look(f"raises {type(error).__name__} when planted: {error}", False))
        return
    under = seen()
    try:
        planted.__exit__(None, None, None)
    except Exception as error:  # noqa: BLE001 - told to the user
        out.send(Look(f"raises {type(error).__name__} when lifted: {error}", True))
        return
    stays = "" if seen() == before else "cannot be lifted: results differ from before"
    out.send(Look(stays, under != before))


def draw(
    recipes: Sequence[Recipe],
    stateful: Sequence[Stateful],
    number: int,
    kind: Compile,
    ladders: Callable[[Spec], int] = rarely,
) -> list[Case]:
    """So many cases of each of both kinds, always the same ones; of a hundred direct ones so many
    have ladder data."""
    drawn: list[Case] = []
    for strategy in (
        cases(recipes, compile=kind, ladders=ladders) if recipes else None,
        schedule_cases(stateful) if stateful else None,
    ):
        if strategy is not None:
            drawn += _examples(strategy, number)
    return drawn


def _examples(strategy: st.SearchStrategy[Case], number: int) -> list[Case]:
    found: list[Case] = []

    @seed(0)
    @settings(
        max_examples=number,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(case: Case) -> None:
        found.append(case)

    run()
    return found


def digest(value: Any) -> str:
    """Hash of plain data, numpy arrays and records of them; tracebacks are left out."""
    made = hashlib.sha256()
    _feed(made, value)
    return made.hexdigest()


def _feed(made: Any, value: Any) -> None:
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        made.update(f"{array.dtype}{array.shape}".encode())
        made.update(array.tobytes())
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name not in ("traceback", "message"):
                _feed(made, field.name)
                _feed(made, getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key in value:
            _feed(made, key)
            _feed(made, value[key])
    elif isinstance(value, list | tuple):
        made.update(f"{len(value)}[".encode())
        for part in value:
            _feed(made, part)
    elif isinstance(value, frozenset):  # whose order is another one in each process
        _feed(made, sorted(value))
    else:
        assert value is None or isinstance(value, str | bytes | int | float | bool), type(value)
        made.update(repr(value).encode())
