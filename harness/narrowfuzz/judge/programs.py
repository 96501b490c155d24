"""Built programs, cached between cases: a Spec is built once and serves many data draws.

This cache is the only mutable state of judging, and changes no verdict.
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

#: Number of cached programs. The rules that rerun one case build a dozen Specs; a compiled program
#: must outlive them.
_KEPT = 40
#: Needed in every run.
_key = lru_cache(4 * _KEPT)(compile_key)


@dataclass
class Programs:
    """The programs of these recipes on a device, which has the name that torch gives it."""

    recipes: Mapping[str, Recipe]
    device: str
    compiles: int = 0
    compile_seconds: float = 0.0
    #: Called before a compilation, to register callbacks that torch._dynamo.reset has removed.
    listen: Callable[[], None] = lambda: None
    #: Called with the arm of every program that is requested.
    note_arm: Callable[[Arm], None] = lambda arm: None
    _prepared: set[str] = field(default_factory=set)
    _subjects: dict[str, Subject] = field(default_factory=dict)
    _kept: OrderedDict[tuple[str, str], Program] = field(default_factory=OrderedDict)
    #: Key of the Spec whose code Dynamo compiled last, whether its programs are cached or not.
    _compiled: str = ""

    def subject(self, recipe: Recipe) -> Subject:
        """The recipe's library, prepared for the device."""
        if recipe.name not in self._subjects:
            recipe.prepare()
            subject = replace(recipe.subject(self.device), device=self.device)
            self._subjects[recipe.name] = subject
        return self._subjects[recipe.name]

    def of(self, spec: Spec, arm: Arm) -> Program:
        """The program of the Spec on this arm. An eager training with events gets a fresh model
        each time: its events may leave state in the model."""
        self.note_arm(arm)
        if spec.events and not arm.compiler:
            return self._built(spec, arm)
        # only a compiled dynamic graph serves other dims; eagerly each Spec has its own program
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
        """Run the program tapped. The time of a compiled program's first run counts as compile
        time."""
        compiles, started = program.arm.compiler and not program.ran, time.monotonic()
        trace = program.run(tensors, tap=True, spec=spec, focus=focus)
        if compiles:
            self.compile_seconds += time.monotonic() - started
        return trace

    def clear(self) -> None:
        """Drop all programs."""
        self._kept.clear()

    def _built(self, spec: Spec, arm: Arm) -> Program:
        recipe = self.recipes[spec.recipe]
        if recipe.name not in self._prepared:
            recipe.prepare()
            self._prepared.add(recipe.name)
        return Program(spec, recipe, arm, device=self.device)

    def _forget_compiled(self, keep: str) -> None:
        """Drop the compiled programs of other Specs: Dynamo caches by code object and would
        recompile, then give up compiling."""
        if self._compiled not in ("", keep):
            for key in [k for k, p in self._kept.items() if p.arm.compiler and k[0] != keep]:
                del self._kept[key]
            torch._dynamo.reset()
        self._compiled = keep
