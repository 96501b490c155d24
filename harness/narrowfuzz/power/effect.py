"""Checks whether a fault changes anything, and whether everything is as before once it is lifted.

The traces of runs are compared: results, gradients, codes, scales, state, errors, and what a
conversion changed. A campaign that finds nothing is a miss only if the fault has an effect.
"""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing as mp
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from narrowfuzz.arms.available import select_arms
from narrowfuzz.arms.memory import poisoned
from narrowfuzz.case.arm import Compile
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.draw.choices import examples
from narrowfuzz.draw.library_specs import ALWAYS
from narrowfuzz.draw.operator_specs import operator_specs
from narrowfuzz.draw.sharded_specs import sharded_specs
from narrowfuzz.draw.strategies import (
    batches,
    cases,
    ladder_percent_high,
    ladder_percent_low,
    schedule_cases,
)
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.machine.environment import quieten
from narrowfuzz.models.catalog import of_kind
from narrowfuzz.plants.registry import find_plant, planted
from narrowfuzz.recipe.recipe import Recipe, unconverted
from narrowfuzz.recipe.source import split_by_source
from narrowfuzz.triage.session import Session, SessionOptions, open_session

A = TypeVar("A")

#: Number of cases of each kind that check whether a fault can be lifted.
LIFTED = 4
#: The most compiled cases, as compiling is slow.
_COMPILED = 6
#: Time limit for the process in which a fault is tried.
_SECONDS = 300.0


@dataclasses.dataclass(frozen=True)
class Effect:
    """How the traces of the same cases compare before a fault is planted, with it, and after it."""

    #: Why the fault cannot be used; "" if it can.
    problem: str
    #: True if any trace differs while the fault is planted.
    changes: bool


@dataclasses.dataclass(frozen=True)
class Tried:
    """A fault, where it is planted, and how many cases of each kind are drawn to try it."""

    #: The file that defines it; "" if it is built in.
    file: str
    id: str
    recipes: Sequence[str]
    recipe_files: Sequence[Path]
    device: str
    number: int
    compiled: bool = False

    def opened(self) -> tuple[Session, list[Case]]:
        """A session whose recipes are ready, and the drawn cases. To be called in the process in
        which the fault is tried."""
        quieten()
        options = SessionOptions(
            device=self.device, recipes=self.recipes, recipe_files=self.recipe_files, ledger="none"
        )
        session, fault = open_session(options), find_plant(self.file, self.id)
        chosen = [*session.prepared_recipes().values()]
        if all(BY_NAME[name].sharded for name in select_arms(fault.arms)):
            # skip cases that raise: which rank raises first is random
            return session, [
                case
                for case in draw_on_ranks(chosen, self.number)
                if not any(trace.error for trace in session.judge.run_arms(case).values())
            ]
        drawn = draw(
            chosen,
            self.number,
            ladders=ladder_percent_low if self.device == "cpu" else ladder_percent_high,
        )
        if self.compiled:
            drawn += draw(chosen, min(self.number, _COMPILED), "inductor")
        return session, drawn

    def answer(self, ask: Callable[[Tried], A]) -> A | None:
        """The result of ``ask(self)`` in a process of its own; None if the fault ended that
        process. Raises TimeoutError if it takes too long."""
        context = mp.get_context("forkserver")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(ask, self, theirs))
        process.start()
        theirs.close()
        try:
            if not ours.poll(_SECONDS):
                raise TimeoutError(f"no answer in {_SECONDS:.0f} s")
            answer: A = ours.recv()
            return answer
        except EOFError:
            return None
        finally:
            if process.is_alive():
                process.kill()
            process.join()


def _answer(ask: Callable[[Tried], Any], tried: Tried, out: Connection) -> None:
    out.send(ask(tried))


def effect(tried: Tried) -> Effect:
    """Plant a fault in a process of its own on its device, and lift it again."""
    try:
        # ending the process is an effect, too
        return tried.answer(_compare) or Effect("", True)
    except TimeoutError as why:
        return Effect(str(why), True)


def _compare(tried: Tried) -> Effect:
    session, drawn = tried.opened()

    def seen() -> str:
        judge = session.new_judge(Ledger([]))
        # results that nobody writes are then the same each time
        with poisoned((), tried.device):
            return digest([judge.run_arms(case) for case in drawn])

    before = seen()
    try:
        planting = planted(tried.file, tried.id)
        planting.__enter__()
    except Exception as error:  # noqa: BLE001 - reported to the user
        return Effect(f"raises {type(error).__name__} when planted: {error}", False)
    under = seen()
    try:
        planting.__exit__(None, None, None)
    except Exception as error:  # noqa: BLE001 - reported to the user
        return Effect(f"raises {type(error).__name__} when lifted: {error}", True)
    stays = "" if seen() == before else "cannot be lifted: results differ from before"
    return Effect(stays, under != before)


def draw(
    recipes: Sequence[Recipe],
    number: int,
    kind: Compile = "none",
    ladders: Callable[[Spec], int] = ladder_percent_low,
) -> list[Case]:
    """The same ``number`` of cases each time: of the recipes that convert models, of the operators
    if a recipe converts nothing and, if not compiled, of the stateful recipes. ``ladders`` is the
    percentage of direct cases that have ladder data."""
    models, stateful = split_by_source(recipes)
    drawn: list[Case] = []
    if models:
        drawn += examples(cases(models, compile=kind, ladders=ladders), number)
    if plain := [recipe for recipe in models if unconverted(recipe)]:
        single = batches(operator_specs(plain, of_kind("operator"), compile=kind), draws=1)
        drawn += [case for batch in examples(single, number) for case in batch]
    if stateful and kind == "none":
        drawn += examples(schedule_cases(stateful), number)
    return drawn


def draw_on_ranks(recipes: Sequence[Recipe], number: int) -> list[Case]:
    """The same ``number`` of cases on ranks each time, of the recipes that shard models and of the
    stateful recipes."""
    models, stateful = split_by_source(recipes)
    drawn: list[Case] = []
    if shards := [recipe for recipe in models if recipe.shards]:
        some = batches(sharded_specs(shards), draws=1)
        drawn += [case for batch in examples(some, number) for case in batch]
    if stateful:
        drawn += examples(schedule_cases(stateful, ranks=ALWAYS), number)
    return drawn


def digest(value: Any) -> str:
    """Hash of plain data, numpy arrays and dataclasses of them, without messages."""
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
            if field.name != "message":
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
    elif isinstance(value, frozenset):  # its order differs between processes
        _feed(made, sorted(value))
    else:
        assert value is None or isinstance(value, str | bytes | int | float | bool), type(value)
        made.update(repr(value).encode())
