"""Run a control as an ordinary campaign and tell what was found on it: nothing, or false alarms."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from narrowfuzz.arm import BY_NAME, EAGER, LADDER, REFERENCE, climb
from narrowfuzz.arms.ladder import select_arms
from narrowfuzz.campaign.config import Config
from narrowfuzz.campaign.store import Store
from narrowfuzz.campaign.summary import pairs_seen
from narrowfuzz.campaign.supervisor import Tally, play, start_server
from narrowfuzz.case import ModelName, Spec
from narrowfuzz.coverage import Pair
from narrowfuzz.device import asked_here, check_device
from narrowfuzz.plants.plant import Plant
from narrowfuzz.recipe import load_every, obstacle, select
from narrowfuzz.schedule.story import FEATURES

#: Draws of each Spec, and of each compiled one: a control has few cases, which should be as many
#: Specs as it can pay for.
_DRAWS, _COMPILED_DRAWS = 8, 100


@dataclass(frozen=True)
class ControlResult:
    """What a campaign on a control saw."""

    id: str
    #: Judged cases.
    cases: int
    seconds: float
    #: Fingerprints of false alarms, and of what their scripts do not show.
    findings: tuple[str, ...]
    suspected: tuple[str, ...]
    #: Pairs of features that met, and the rungs that ran.
    pairs: frozenset[Pair]
    arms: frozenset[str]
    #: What could not be done, in sentences.
    notes: tuple[str, ...]

    def met(self, dimension: str) -> frozenset[str]:
        """The values of a dimension (``model``, ``schedule``, ...) that the cases had."""
        return frozenset(v for pair in self.pairs for name, v in pair if name == dimension)


def run_control(
    control: Plant,
    cases: int,
    seed: int,
    workers: int = 1,
    *,
    file: str = "",
    device: str = "cpu",
    minutes: float = 30.0,
    tally: Tally | None = None,
) -> ControlResult:
    """Judge so many cases of a control, or as many as the time allows. ``file`` is where the
    control is defined, "" built in; ``device`` is where it runs if it does not say. ``tally`` lets
    the caller watch and interrupt.

    Raises ValueError if a recipe of it cannot run here, RuntimeError if the campaign broke.
    """
    device = control.device or device
    recipes = _recipes(control, device)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="narrowfuzz-control-") as folder:
        store = Store(Path(folder))
        config = Config(
            out=store.out,
            minutes=minutes,
            workers=workers,
            seed=seed,
            recipes=recipes,
            recipe_files=control.recipe_files,
            arms=control.arms,
            plant=(file, control.id),
            models=control.models,
            device=device,
            wild_shapes=control.wild_shapes,
            cases=cases,
            draws=_DRAWS,
            compiled_draws=_COMPILED_DRAWS,
        )
        if tally is None:  # whoever brings one has started the server
            tally = Tally()
            start_server(device)
        play(config, store, lambda tally: None, tally)
        if tally.broken:
            raise RuntimeError(f"control {control.id}: {'; '.join(tally.notes)}")
        pairs = pairs_seen(tally.counts)
        return ControlResult(
            id=control.id,
            cases=tally.counts["cases"],
            seconds=time.monotonic() - started,
            findings=tuple(f.fingerprint for f in store.findings()),
            suspected=tuple(f.fingerprint for f in store.suspected()),
            pairs=pairs,
            arms=_arms(control, pairs),
            notes=tuple(tally.notes),
        )


def lacking(results: Iterable[ControlResult]) -> tuple[str, ...]:
    """The models, rungs and features of schedules that none of the controls has run."""
    results = tuple(results)
    kinds = {
        "model": (frozenset(get_args(ModelName)), [r.met("model") for r in results]),
        "rung": (frozenset(arm.name for arm in LADDER), [r.arms for r in results]),
        "schedule": (frozenset(FEATURES), [r.met("schedule") for r in results]),
    }
    return tuple(
        f"{kind} {name}"
        for kind, (wanted, met) in kinds.items()
        for name in sorted(wanted.difference(*met))
    )


def _recipes(control: Plant, device: str) -> tuple[str, ...]:
    """The control's recipes that run here. Raises ValueError if none does."""
    check_device(device)
    files = control.recipe_files
    there = load_every(files)
    reasons = {
        n: obstacle(r, asked_here(device)) for n, r in select(there, control.recipes).items()
    }
    chosen = tuple(name for name, reason in reasons.items() if not reason)
    if not chosen:
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ValueError(f"control {control.id} cannot run here: {why}")
    return chosen


def _arms(control: Plant, pairs: Iterable[Pair]) -> frozenset[str]:
    """The rungs that cases with these features climbed."""
    allowed = select_arms(control.arms)
    found: set[str] = set()
    for pair in pairs:
        values = dict(pair)
        if values.keys() != {"rung", "checkpoint"}:
            continue
        rung = BY_NAME[values["rung"]]  # a value of Spec.compile is an arm's name, too
        spec = Spec(
            recipe="",
            compile=rung.compiler or "none",  # type: ignore[arg-type]
            checkpoint=values["checkpoint"],  # type: ignore[arg-type]
            kernels="both" if rung.native else "default",
        )
        found |= {REFERENCE.name, EAGER.name} | {a.name for a in climb(spec) if a.name in allowed}
    return frozenset(found)
