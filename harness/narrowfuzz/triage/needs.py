"""What a minimal case needs, besides what every case has: the words by which causes are told apart.

The minimiser has reset whatever the divergence does not need, so what is left is what it takes.
Two findings of one recipe whose minimal cases need the same, and more than nothing, are sightings
of one cause: a state machine that went wrong once breaks many rules. So is one that breaks a rule
which another breaks with less.
"""

from __future__ import annotations

import msgspec

from narrowfuzz.case.events import Reload, Settings, Step, Switch
from narrowfuzz.case.features import features
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Case, Sharding, Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.trace.expect import Present
from narrowfuzz.trace.verdict import Verdict

#: How large a case is, what it runs on, and what its rung says already: no conditions of a cause.
_SIZES = frozenset(
    {
        "recipe",
        "backend",
        "m",
        "k",
        "n",
        "batch",
        "dtype",
        "events",
        "compile",
        "checkpoint",
        "kernels",
        "sharding",
    }
)
#: What a library's layers have, however simple.
_SHAPES = frozenset({"model", "settings", "depth", "wraps"})
#: Features that speak of data.
_DATA = frozenset({"zero", "spike", "inf", "decaying"})
#: What a plain run that shows it does without.
_OF_CHECKPOINT = frozenset({"checkpoint", "nested checkpoints"})


def needs_of(case: Case, verdict: Verdict) -> list[str]:
    """The conditions in words, sorted; none for a plain case. The call of an operator, whose script
    needs no model, has threads at most."""
    spec = case.spec
    if verdict.at.what == "operator":
        return [f"threads={spec.threads}"] if spec.threads > 1 else []
    found = features(spec) - _DATA
    leave = _SIZES
    if spec.model in MODELS and MODELS[spec.model].package:
        leave |= {"model"}  # there is no other that its recipe runs
    if spec.layer:
        kinds = {Reload: "reload", Switch: "switch", Step: "step"}
        found |= {kinds[type(event)] for event in spec.events if type(event) in kinds}
        found |= {f"{n}={value}" for n, value in _changed(spec.settings, Settings, frozenset())}
        leave |= _SHAPES
        if not BY_NAME[verdict.arm].recomputes:
            found -= _OF_CHECKPOINT
        elif spec.checkpoint != "none":
            found |= {f"checkpoint={spec.checkpoint}", f"wraps={spec.wraps}"}
    found |= {f"{name}={value}" for name, value in _changed(spec, Spec, leave)}
    found |= {f"{name}={value}" for name, value in _changed(spec.sharding, Sharding, frozenset())}
    return sorted(found)


def needless_of(drawn: Case, minimal: Case, verdict: Verdict) -> list[str]:
    """The conditions of a case as it was drawn that its smallest case is without, whatever their
    values."""
    kept = {need.partition("=")[0] for need in needs_of(minimal, verdict)}
    return [need for need in needs_of(drawn, verdict) if need.partition("=")[0] not in kept]


def lacking_of(verdict: Verdict) -> frozenset[str]:
    """Of which parameters, whatever linear has them, a gradient is missing: ``bias`` of
    ``grad_bias`` and of ``proj.bias.grad``."""
    names = verdict.expect.names if isinstance(verdict.expect, Present) else ()
    return frozenset(
        name.removeprefix("grad_").removesuffix(".grad").rpartition(".")[2] for name in names
    )


def _changed(
    struct: msgspec.Struct, kind: type[msgspec.Struct], leave: frozenset[str]
) -> list[tuple[str, object]]:
    """Fields that are not at their defaults."""
    return [
        (field.name, getattr(struct, field.name))
        for field in msgspec.structs.fields(kind)
        if field.name not in leave and getattr(struct, field.name) != field.default
    ]
