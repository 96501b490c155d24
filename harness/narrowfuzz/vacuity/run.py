"""Measure many recipes, each kind that patches a library in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor

from narrowfuzz.case import Compile
from narrowfuzz.device import choose, enter
from narrowfuzz.environment import settle
from narrowfuzz.judge import Judge
from narrowfuzz.ledger import load_ledger
from narrowfuzz.recipe import AnyRecipe, load_every, processes, runnable, select
from narrowfuzz.vacuity.measure import Table, measure


def chosen(globs: Sequence[str]) -> dict[str, AnyRecipe]:
    """The recipes that match; if no glob is given, all that patch no library. Raises ValueError
    for a glob that matches nothing."""
    every = load_every()
    if not globs:
        return {name: recipe for name, recipe in every.items() if not recipe.process}
    return select(every, globs)


def run(
    recipes: Mapping[str, AnyRecipe],
    cases: int,
    seed: int,
    compile: Compile = "none",
    device: str = "cpu",
) -> Table:
    """The table of these recipes, so many cases of each; this process then runs on the device."""
    found: Table = {}
    for process in processes(recipes.values()):
        names = tuple(n for n, recipe in recipes.items() if recipe.process == process)
        if not process:
            found |= _measure(names, cases, seed, compile, device)
            continue
        for name in names:
            recipes[name].provide()
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found |= pool.submit(_measure, names, cases, seed, compile, device).result()
    return found


def _measure(names: Sequence[str], cases: int, seed: int, compile: Compile, device: str) -> Table:
    choose(device)
    settle()
    where = enter(device)
    recipes = load_every()
    able = [here for name in names if (here := runnable(recipes[name], where.torch))]
    for recipe in able:
        recipe.prepare()
    judge = Judge(recipes, load_ledger(device=where.torch), device=where)
    return measure(judge, able, cases, seed, compile=compile)
