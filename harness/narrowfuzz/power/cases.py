"""Recipes made ready in a process, and examples of what strategies draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.machine.device import Device, choose, enter
from narrowfuzz.machine.environment import settle
from narrowfuzz.recipe.recipe import AnyRecipe, load_every, runnable

T = TypeVar("T")


@dataclass(frozen=True)
class Ready:
    """What a process on a device can judge, and those of the chosen recipes that run on it."""

    device: Device
    recipes: dict[str, AnyRecipe]
    chosen: list[AnyRecipe]

    def judge(self, ledger: Ledger) -> Judge:
        return Judge(self.recipes, ledger, device=self.device)


def ready(names: Sequence[str], device: str, files: Sequence[Path] = ()) -> Ready:
    """Make this process one that runs on the device, with these recipes prepared."""
    choose(device)
    settle()
    where = enter(device)
    recipes = load_every(files)
    chosen = [able for name in names if (able := runnable(recipes[name], where.torch))]
    for recipe in chosen:
        recipe.prepare()
    return Ready(where, recipes, chosen)


def examples(strategy: st.SearchStrategy[T], count: int, number: int = 0) -> list[T]:
    """So many examples, the same for the same number; the first is always the simplest one."""
    found: list[T] = []

    @seed(number)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def take(example: T) -> None:
        found.append(example)

    take()
    return found
