"""A model's linears as cases of their own: each call is judged by its arguments and results.

So errors of earlier layers do not excuse a layer, and later layers do not hide its own error. The
rules are those of a single linear; nothing about them is weaker here.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np

from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.numerics.formats import F32, FORMATS, round_to
from narrowfuzz.numerics.plan import unquantised
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Given, bits
from narrowfuzz.trace.trace import LayerCall, Trace


def layer_evidences(evidence: Evidence) -> Iterator[tuple[At, Evidence]]:
    """Yields place and evidence of some calls of each layer in the plain eager runs, always
    including the first and the last."""
    for arm, trace in evidence.plain.items():
        calls = [c for c in trace.calls if c.phase == "forward"]
        times = Counter(call.module for call in calls)
        for call in calls:
            last = times[call.module] - 1
            if call.index % -(-times[call.module] // _CALLS) == 0 or call.index == last:
                yield At(layer=call.module, call=call.index), layer_evidence(evidence, arm, call)


#: The approximate number of calls that are judged of each layer.
_CALLS = 4
#: The tensors that an unconverted linear rounds under autocast.
_PLAIN_ROUNDS = frozenset({"input", "weight", "bias"})
#: Result of a linear -> the tensors that it depends on.
_RESTS_ON = {
    "output": ("input", "weight", "bias"),
    "grad_input": ("weight", "grad_output"),
    "grad_weight": ("input", "grad_output"),
    "grad_bias": ("grad_output",),
}


def given_of(call: LayerCall, role: str) -> tuple[Given, ...]:
    """Checksums of the tensors that result ``role`` of this call depends on."""
    return tuple(
        Given(
            name,
            At(what="tensor", layer=call.module, call=call.index, phase="forward", name=name),
            bits(zlib.crc32(np.ascontiguousarray(call.tensors[name], dtype="<f4").tobytes())),
        )
        for name in _RESTS_ON.get(role, ())
        if name in call.tensors
    )


def layer_evidence(evidence: Evidence, arm: str, call: LayerCall) -> Evidence:
    """One call on this arm, as the evidence of a single linear."""
    spec = layer_spec(evidence.spec, call, native=evidence.native(arm))
    assert evidence.converted_plan_of is not None
    plan = evidence.converted_plan_of(spec)
    unconverted = evidence.not_converted(arm, call.module)
    if unconverted:
        call = replace(call, rounds=_PLAIN_ROUNDS)
        plan = unquantised(spec.dtype).added_by(evidence.accumulators, spec.dtype)
    data = msgspec.structs.replace(evidence.case.data, regime="wild")
    trace = Trace(arm, call.outputs, call.sites, unobserved=call.unobserved)
    return replace(
        evidence,
        case=Case(spec=spec, data=data),
        plan=plan,
        tensors=layer_tensors(call),
        traces={arm: trace},
        repeats={},
        rerun=None,
        twin=None,
        given=partial(given_of, call),
        unconverted=unconverted,
    )


def layer_spec(spec: Spec, call: LayerCall, *, native: bool = False) -> Spec:
    """The Spec of a single linear that equals this call; ``native``: PyTorch's own kernels
    multiplied."""
    out, width = call.tensors["weight"].shape
    return Spec(
        recipe=spec.recipe,
        backend=spec.backend,
        m=call.tensors["input"].shape[0] // (call.batch or 1),
        k=width,
        n=out,
        batch=call.batch,
        bias="bias" in call.tensors,
        dtype=call.dtype,  # type: ignore[arg-type]
        grad_mode="train" if "grad_output" in call.tensors else "no_grad",
        kernels="native" if native else "default",
    )


def layer_tensors(call: LayerCall) -> dict[str, F32]:
    """The tensors that the layer computed with: under autocast, those that its recipe rounds first
    are rounded."""
    fmt = FORMATS[call.dtype]
    if fmt.bits == 32:
        return dict(call.tensors)
    narrow = {*call.rounds, "grad_output"}  # a gradient has the type of its output
    return {
        name: round_to(t, fmt, overflow="ieee").astype("float32") if name in narrow else t
        for name, t in call.tensors.items()
    }
