"""The conditions of a divergence: the fields of its minimal case that are not at their defaults.

The minimiser has reset every field that the divergence does not need, so those that remain are its
conditions. They distinguish causes: two findings of one recipe with the same conditions, at
least one, have one cause, because a state machine that went wrong once breaks many rules. The same
holds for a finding that breaks a rule which another finding breaks with fewer conditions.
"""

from __future__ import annotations

import msgspec

from narrowfuzz.case.events import Reload, Settings, Step, Switch
from narrowfuzz.case.features import features
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.trace.expect import Present
from narrowfuzz.trace.verdict import Verdict

#: Fields that are no conditions: sizes, what the case runs on, and what its rung already states.
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
#: Fields that every case of a library's own layers has; they are no conditions either.
_SHAPES = frozenset({"model", "settings", "depth", "wraps"})
#: Features of the data.
_DATA = frozenset({"zero", "spike", "inf", "decaying"})
#: Features that are no conditions if an arm without recompute shows the divergence.
_OF_CHECKPOINT = frozenset({"checkpoint", "nested checkpoints"})


def needs_of(case: Case, verdict: Verdict) -> list[str]:
    """The conditions in words, sorted; none for a plain case. For the call of an operator, whose
    script needs no model, the only possible condition is the number of threads."""
    spec = case.spec
    if verdict.at.what == "operator":
        return [f"threads={spec.threads}"] if spec.threads > 1 else []
    found = features(spec) - _DATA
    leave = _SIZES
    if spec.model in MODELS and MODELS[spec.model].package:
        leave |= {"model"}  # its recipe runs no other model
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
    """The conditions of the case as it was drawn whose fields or features, with whatever value, are
    no conditions of its smallest case."""
    remaining = {need.partition("=")[0] for need in needs_of(minimal, verdict)}
    return [need for need in needs_of(drawn, verdict) if need.partition("=")[0] not in remaining]


def lacking_of(verdict: Verdict) -> frozenset[str]:
    """Names of the parameters whose gradient is missing, without the name of their linear: ``bias``
    for ``grad_bias`` and for ``proj.bias.grad``."""
    names = verdict.expect.names if isinstance(verdict.expect, Present) else ()
    return frozenset(
        name.removeprefix("grad_").removesuffix(".grad").rpartition(".")[2] for name in names
    )


def _changed(
    struct: msgspec.Struct, kind: type[msgspec.Struct], leave: frozenset[str]
) -> list[tuple[str, object]]:
    """Names and values of the fields that are not at their defaults, except those in ``leave``."""
    return [
        (field.name, getattr(struct, field.name))
        for field in msgspec.structs.fields(kind)
        if field.name not in leave and getattr(struct, field.name) != field.default
    ]
