"""What triage does with each kind of case: which scripts may show it, and how it is minimised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from narrowfuzz.case.arm import EAGER, EAGER_NATIVE
from narrowfuzz.case.kind import LAYERS, LINEAR, MODEL, ON_RANKS, Kind, kind_of
from narrowfuzz.case.ladder import BY_NAME as ARMS
from narrowfuzz.case.spec import Case, Spec, Spike
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.plan import OPERANDS, Role
from narrowfuzz.numerics.reference import canonical_operands
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.rules.evidence import Evidence, OwnLayers
from narrowfuzz.trace.expect import Refuses
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.finding import Story
from narrowfuzz.triage.layer import first_of, linear_of
from narrowfuzz.triage.minimise_library import simpler_cases
from narrowfuzz.triage.script.choice import script_of
from narrowfuzz.triage.script.layers import of_layers
from narrowfuzz.triage.script.model import of_model
from narrowfuzz.triage.script.operator import call_of, of_operator
from narrowfuzz.triage.script.parts import Tensors
from narrowfuzz.triage.script.played import write_played_script
from narrowfuzz.triage.script.ranks import of_ranks
from narrowfuzz.triage.script.short import write_short_script
from narrowfuzz.triage.story import story_of

#: Rules about one operand of one GEMM.
OPERAND_RULES = ("O2", "O3", "O4")
#: Writes a script; raises ValueError if no script can show the divergence.
Write = Callable[[], str]


def _only_as_dear(case: Case, arm: str) -> Case:
    """The same case without the rungs that are more expensive than this one."""
    changes: dict[str, str] = {"compile": ARMS[arm].compiler or "none"}
    if not ARMS[arm].recomputes:
        changes["checkpoint"] = "none"
    if not ARMS[arm].native:
        changes["kernels"] = "default"
    return msgspec.structs.replace(case, spec=msgspec.structs.replace(case.spec, **changes))


@dataclass(frozen=True)
class Form:
    """What triage does with a kind of case."""

    #: Yields writers of scripts that may show a divergence of a case, the simplest first.
    scripts: Callable[[Judge, Case, Verdict], Iterator[Write]]
    #: The script of a case that ends or hangs its process, for a device by torch's name.
    lost: Callable[[Case, Verdict, Recipe, str], str] = lambda case, verdict, recipe, device: (
        script_of(case, verdict, recipe, device=device)
    )
    #: The case without rungs more expensive than the guilty one.
    cheapest: Callable[[Case, str], Case] = _only_as_dear
    #: The simpler cases that minimising tries, each on its own data; None: fields are reset one by
    #: one.
    neighbours: Callable[[Case], Iterator[tuple[str, Case]]] | None = None
    #: An element that may be enough to cause the divergence, which minimising tries first.
    hint: Callable[[Judge, Case, Verdict], Spike | None] = lambda judge, case, verdict: None
    #: What happened event by event, for cases in which a state persists between events.
    story: Callable[[Evidence, Verdict], Story | None] = lambda evidence, verdict: None
    #: True if one process runs the case on the case's own tensors: then reports show the guilty
    #: tensor, and triage repeats runs in search of nondeterminism.
    one_process: bool = False
    #: The size of a case, by which to choose among several that show the same.
    size: Callable[[Spec], int] = lambda spec: (
        spec.tokens * spec.k + spec.k * spec.n + spec.tokens * spec.n
    )


def form_of(spec: Spec) -> Form:
    """The form of this Spec's cases."""
    return _FORMS[kind_of(spec)]


def _scripts_of_linear(judge: Judge, case: Case, verdict: Verdict) -> Iterator[Write]:
    if verdict.at.what == "operator":
        yield from _of_calls(judge, case, verdict)
        return
    recipe, device = judge.recipe(case.spec), judge.device.torch
    yield partial(script_of, case, verdict, recipe, device=device)
    # a played script may show what the short one does not
    tensors = tensors_of(case, recipe)
    yield lambda: write_played_script(of_model(case, verdict, recipe, tensors, device))


def _scripts_of_model(judge: Judge, case: Case, verdict: Verdict) -> Iterator[Write]:
    """Scripts of the guilty operator call; or of the guilty linear by itself, then of the whole
    model."""
    at, recipe, device = verdict.at, judge.recipe(case.spec), judge.device.torch
    if at.what == "operator":
        yield from _of_calls(judge, case, verdict)
        return
    # a single linear cannot show that a recompute was given another tensor
    own = at.layer and at.what != "function" and (at.phase != "recompute" or at.side)
    plain = EAGER_NATIVE if ARMS[verdict.arm].native else EAGER
    layer = linear_of(judge, case, at.layer, at.call, plain) if own else None
    if layer is not None:
        layer_case = msgspec.structs.replace(case, spec=layer[0])
        yield partial(script_of, layer_case, verdict.of_linear(), recipe, layer[1], device=device)
    first, values = first_of(judge, case, verdict), _values(case, verdict, recipe)
    yield partial(script_of, case, first, recipe, values, device=device)


def _of_calls(judge: Judge, case: Case, verdict: Verdict) -> Iterator[Write]:
    """The script of the guilty call of an operator, then that of the calls before it as well, on
    whose state it may depend."""
    call, earlier = call_of(judge, case, verdict)
    device = judge.device.torch
    yield lambda: write_short_script(of_operator(call, verdict, device))
    if earlier:
        yield lambda: write_short_script(of_operator(call, verdict, device, earlier))


def _values(case: Case, verdict: Verdict, recipe: Recipe) -> Tensors | None:
    """The tensors of a script about a refusal by a package's model, which has millions of elements:
    zeros except for the input, as sizes are refused whatever the values. None for any other case,
    whose script has the case's own tensors."""
    if not (isinstance(verdict.expect, Refuses) and MODELS[case.spec.model].package):
        return None
    given = tensors_of(case, recipe).items()
    return {name: t if name.startswith("input") else np.zeros_like(t) for name, t in given}


def _scripts_of_ranks(judge: Judge, case: Case, verdict: Verdict) -> Iterator[Write]:
    recipe, device = judge.recipe(case.spec), judge.device.torch
    yield lambda: write_played_script(
        of_ranks(case, verdict, recipe, tensors_of(case, recipe), device)
    )


def _scripts_of_layers(judge: Judge, case: Case, verdict: Verdict) -> Iterator[Write]:
    recipe, device = judge.recipe(case.spec), judge.device.torch
    yield lambda: write_played_script(
        of_layers(judge.observe(case), verdict, recipe, device=device)
    )


def _lost_layers(case: Case, verdict: Verdict, recipe: Recipe, device: str) -> str:
    """The script, written without evidence, as the case's runs would end or hang this process."""
    unseen = Evidence(case, {}, library=OwnLayers("current", lambda settings: None))
    return write_played_script(of_layers(unseen, verdict, recipe, device=device))


def _largest(judge: Judge, case: Case, verdict: Verdict) -> Spike | None:
    """The largest element of the operand row in which a quantiser rule was broken, as a spike; None
    for other rules."""
    if verdict.rule not in OPERAND_RULES or not verdict.at.index:
        return None
    role: Role = verdict.role  # type: ignore[assignment]
    tensors = tensors_of(case, judge.recipe(case.spec))
    a, b = canonical_operands(role, tensors)
    row = (a if verdict.at.side == "a" else b)[verdict.at.index[0]]
    name, _ = OPERANDS[role][verdict.at.side == "b"]
    value = row[np.argmax(np.abs(row))]
    bits = f"0x{int(np.float32(value).view(np.uint32)):08x}"
    return Spike(name, 0, 0, bits)


_FORMS: dict[Kind, Form] = {
    LINEAR: Form(_scripts_of_linear, hint=_largest, one_process=True),
    MODEL: Form(_scripts_of_model, one_process=True),
    # cheapest: nothing is dropped, as every rung is cheap and a forward's own region is placed
    # where the Spec's checkpoint wraps layers
    LAYERS: Form(
        _scripts_of_layers,
        _lost_layers,
        lambda case, arm: case,
        neighbours=simpler_cases,
        story=story_of,
        size=lambda spec: len(spec.events),
    ),
    **dict.fromkeys(ON_RANKS, Form(_scripts_of_ranks)),
}
