"""Draw cases as a campaign does, judge them, and ask of every pass whether it could have failed."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from narrowfuzz.case import Case, Compile
from narrowfuzz.judge import Judge
from narrowfuzz.numerics.reference import Undivided
from narrowfuzz.oracles import OF_CONVERTED
from narrowfuzz.oracles.applied import checks
from narrowfuzz.oracles.oracle import Oracle
from narrowfuzz.oracles.schedule import OF_LIBRARY
from narrowfuzz.oracles.schedule_evidence import LibraryEvidence
from narrowfuzz.recipe import AnyRecipe
from narrowfuzz.specs import of_rung
from narrowfuzz.stateful import Stateful
from narrowfuzz.strategies import batches, schedule_cases
from narrowfuzz.vacuity import schedules, table
from narrowfuzz.vacuity.perturbation import remembering
from narrowfuzz.vacuity.probe import Pass, probe

#: Data draws of one Spec, and relations that each of them meets besides all other rules.
DRAWS, RELATIONS = 4, 6
#: Vacuous cases kept of each rule and recipe.
_EXAMPLES = 3


@dataclass
class Tally:
    """Passes of one rule on one recipe."""

    passes: int = 0
    vacuous: int = 0
    #: Perturbation -> passes it was tried on, and of those the ones that did not notice it.
    tried: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    #: (case, arm, role, layer) of vacuous passes.
    examples: list[tuple[Case, str, str, str]] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.vacuous / self.passes if self.passes else 0.0

    def take(self, case: Case, found: Pass) -> None:
        self.passes += 1
        self.vacuous += found.vacuous
        self.tried.update(found.tried)
        self.missed.update(found.tried - found.noticed)
        if found.vacuous and len(self.examples) < _EXAMPLES:
            self.examples.append((case, found.arm, found.role, found.layer))


Table = dict[tuple[str, str], Tally]
_ALL = tuple(dict.fromkeys(p for ps in table.RELEVANT.values() for p in ps))


def measure(
    judge: Judge,
    recipes: Sequence[AnyRecipe],
    cases: int,
    seed: int,
    *,
    compile: Compile = "none",
) -> Table:
    """(rule, recipe) -> its passes, over so many cases of each recipe."""
    found: Table = {}
    for recipe in recipes:
        for case, oracles in drawn(recipe, cases, f"{seed}/{recipe.name}", compile):
            for one in passes(judge, case, oracles):
                found.setdefault((one.oracle, recipe.name), Tally()).take(case, one)
    return found


def passes(judge: Judge, case: Case, oracles: Sequence[Oracle]) -> Iterator[Pass]:
    """Every pass of these rules on one case."""
    evidence = judge.observe(case)
    if isinstance(evidence, LibraryEvidence):
        once = schedules.remembering(evidence)
        for oracle in oracles:
            yield from probe(oracle.check, once, schedules.RELEVANT)
        return
    assert evidence.rerun is not None
    evidence = replace(evidence, rerun=remembering(evidence.rerun))
    with suppress(Undivided):  # ran although its plan has no blocks for it: that is a finding
        for at, check, seen in checks(evidence, oracles):
            yield from probe(check, seen, table.RELEVANT, _ALL, at.layer)


def drawn(
    recipe: AnyRecipe, cases: int, name: str, compile: Compile
) -> Iterator[tuple[Case, Sequence[Oracle]]]:
    """Cases with the rules they meet, from the strategies that campaigns draw from: as there, a
    Spec's first draw meets every rule, and later ones some relations in turn."""
    numbers = random.Random(name)
    if isinstance(recipe, Stateful):
        for case in _generated(schedule_cases([recipe]), cases, numbers):
            yield case, OF_LIBRARY
        return
    relations = itertools.cycle(o for o in OF_CONVERTED if o.reruns)
    core = tuple(o for o in OF_CONVERTED if not o.reruns)
    batch = batches(of_rung([recipe], compile, largest=128), draws=DRAWS)
    for one in _generated(batch, -(-cases // DRAWS), numbers):
        for i, case in enumerate(one):
            some = tuple(itertools.islice(relations, RELATIONS))
            yield case, OF_CONVERTED if i == 0 else (*core, *some)


def _generated(strategy: st.SearchStrategy[Any], count: int, numbers: random.Random) -> list[Any]:
    """So many examples; the engine starts each run with the same simplest one, which counts."""
    found: list[Any] = []

    @seed(numbers.getrandbits(64))
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def take(example: Any) -> None:
        found.append(example)

    take()
    return found
