"""Built programs, kept between cases: a Spec is built once and serves many data draws.

The only thing of judging that changes; it is a cache, and changes no verdict.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import msgspec
import torch

from narrowfuzz.arms.program import Program
from narrowfuzz.case.arm import Arm
from narrowfuzz.case.spec import Spec, compile_key
from narrowfuzz.numerics.formats import F32
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.recipe.stateful import Subject
from narrowfuzz.trace.trace import Trace

#: One case's relations alone build a dozen Specs; a compiled program must outlive them.
_KEPT = 40
#: Asked for in every run.
_key = lru_cache(4 * _KEPT)(compile_key)


@dataclass
class Programs:
    """The programs of these recipes on a device, as torch calls it."""

    recipes: Mapping[str, Recipe]
    device: str
    compiles: int = 0
    compile_seconds: float = 0.0
    #: Called before something is compiled, after torch has forgotten who listens to its compiler.
    listen: Callable[[], None] = lambda: None
    #: Called with each arm that a program is asked for of.
    note_arm: Callable[[Arm], None] = lambda arm: None
    _prepared: set[str] = field(default_factory=set)
    _subjects: dict[str, Subject] = field(default_factory=dict)
    _kept: OrderedDict[tuple[str, str], Program] = field(default_factory=OrderedDict)
    #: The Spec whose code Dynamo has compiled last, whether its programs are here or not.
    _compiled: str = ""

    def subject(self, recipe: Recipe) -> Subject:
        """The recipe's library, made ready."""
        if recipe.name not in self._subjects:
            recipe.prepare()
            subject = replace(recipe.subject(self.device), device=self.device)
            self._subjects[recipe.name] = subject
        return self._subjects[recipe.name]

    def of(self, spec: Spec, arm: Arm) -> Program:
        """The Spec's program. A training that is more than steps has a model of its own each time:
        what happens in it may stay with the model."""
        self.note_arm(arm)
        if spec.events and not arm.compiler:
            return self._built(spec, arm)
        # only a compiled graph serves other dims; run eagerly, a Spec is its own program
        own = spec if arm.compiler else msgspec.structs.replace(spec, dynamic=False)
        key = (_key(own), arm.name)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if arm.compiler:
            self._forget_compiled(_key(spec))
            self.listen()
            self.compiles += 1
        self._kept[key] = self._built(spec, arm)
        program = self._kept[key]
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return program

    def tapped(
        self, program: Program, tensors: dict[str, F32], spec: Spec, focus: int | None
    ) -> Trace:
        """Run it tapped; what a compiled program's first run takes is its compile time."""
        compiles, started = program.arm.compiler and not program.ran, time.monotonic()
        trace = program.run(tensors, tap=True, spec=spec, focus=focus)
        if compiles:
            self.compile_seconds += time.monotonic() - started
        return trace

    def clear(self) -> None:
        """Forget all of them."""
        self._kept.clear()

    def _built(self, spec: Spec, arm: Arm) -> Program:
        recipe = self.recipes[spec.recipe]
        if recipe.name not in self._prepared:
            recipe.prepare()
            self._prepared.add(recipe.name)
        return Program(spec, recipe, arm, device=self.device)

    def _forget_compiled(self, keep: str) -> None:
        """Drop other Specs' artefacts: Dynamo caches by code object and would recompile, then give
        up compiling."""
        if self._compiled not in ("", keep):
            for key in [k for k, p in self._kept.items() if p.arm.compiler and k[0] != keep]:
                del self._kept[key]
            torch._dynamo.reset()
        self._compiled = keep
