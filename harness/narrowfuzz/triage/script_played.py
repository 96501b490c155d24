"""repro.py of any place inside a model: the player's own source, literal data, one check.

It plays the whole case as it was judged, so it shows what a single linear with the layer's tensors
does not: what needs a second step, a shared weight, a copy of the model, a recompute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from narrowfuzz.address import At
from narrowfuzz.arms.ladder import BY_NAME, Arm
from narrowfuzz.case import LEARNING_RATE, Case, Spec
from narrowfuzz.expect import Is, Same, Typed, Within, read
from narrowfuzz.models.zoo import MODELS, source_of, ties
from narrowfuzz.numerics.formats import F32
from narrowfuzz.numerics.plan import ROLES, Plan
from narrowfuzz.oracles import BY_NAME as RULES
from narrowfuzz.play import checkpoint, layers, player
from narrowfuzz.recipe import Recipe
from narrowfuzz.triage.paste import pasted
from narrowfuzz.triage.script_census import TORCH_NAME, quoted
from narrowfuzz.triage.script_parts import GUARD, OF_LINEAR, SLOT, blob
from narrowfuzz.verdict import Verdict

_IMPORTS = f"""
import base64, collections, contextlib, copy, ctypes, io, math, os, re, sys, zlib
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
{GUARD}
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (CheckpointPolicy, checkpoint,
    create_selective_checkpoint_contexts, set_checkpoint_early_stop)
"""

#: Whatever the tap's text appends to ``seen`` is one GEMM of the call that runs.
_TAP = """
@contextlib.contextmanager
def tap(emit):
    class seen:
        append = staticmethod(lambda gemm: emit(*[None if t is None else t.clone() for t in gemm]))
{text}
    yield
"""

_GIVEN = """
def crc(t):
    return zlib.crc32(bytes(t.float().flatten().view(torch.uint8).tolist()))
def held(layer, index, name):
    call = trace.call(layer, index)
    return {{"weight": call.weight, "bias": call.bias, **call.tensors}}[name]
given = {{
{given}
}}
moved = sorted({{f"{{at[0]}} {{at[2]}}" for at, was in given.items() if crc(held(*at)) != was}})
if moved:
    print("cannot tell: the expectation rests on another", " and another ".join(moved))
    sys.exit(125)
"""


def write_played_script(
    case: Case,
    verdict: Verdict,
    recipe: Recipe,
    tensors: Mapping[str, F32],
) -> str:
    """The script's text. Raises ValueError for a place or an expectation that it cannot look at."""
    spec, at, arm = case.spec, verdict.at, BY_NAME[verdict.arm]
    if arm.compiler:
        raise ValueError("a player sees layers in eager runs only")
    if RULES[verdict.oracle].reruns:  # what came, came in another run than the case's
        raise ValueError("a player plays one run, and a relation is about two")
    if spec.direct:
        tensors = {OF_LINEAR.get(name, name): t for name, t in tensors.items()}
        at = at if at.layer else msgspec.structs.replace(at, layer="proj")
    if at.what not in ("result", "codes", "scale", "amax", "source"):
        raise ValueError(f"a player has no eyes for {at}")
    text = recipe.script(spec)
    looks = at.what in ("codes", "scale", "amax")
    if looks and not text.tap:
        raise ValueError(f"{recipe.name} has no tap that a script can use")
    constants = {name: repr(value) for name, value in play_arguments(spec, arm).items()}
    constants |= {"dtype": "dtype", "watch": repr(_watched(verdict, at))}
    if looks:
        constants["tap"] = "tap"
    parts = [
        f'"""{quoted(verdict.sentence())}\n\n{spec.recipe}, {spec.model}, arm {verdict.arm}, rule '
        f"{verdict.oracle}. Exits 1 while this shows, 0 once it is gone, 125 if it cannot tell."
        '\n"""',
        _IMPORTS,
        text.imports,
        f"torch.set_num_threads(1)\ndtype = {TORCH_NAME[spec.dtype]}",
        source_of(spec.model),
        pasted(("play", "Trace"), (layers, checkpoint, player), constants),
        _TAP.format(text="\n".join(f"    {line}" for line in text.tap.splitlines()))
        if looks
        else "",
        blob(tensors),
        f"def build():\n    return {MODELS[spec.model].expression(spec)}.to(dtype)\n"
        f"def convert(model):\n    return {text.convert}",
        "trace = play(Trace(), build, convert, tensors)",
        _check(verdict, at, recipe.plan(spec)),
    ]
    return "\n".join(part.strip("\n") for part in parts if part) + "\n"


def play_arguments(spec: Spec, arm: Arm) -> dict[str, Any]:
    """What ``play`` needs to know of a Spec and an arm, but for its dtype."""
    model = MODELS[spec.model]
    steps = spec.steps > 1 and spec.trains
    options = dict(arm.options)
    if arm.compiler == "inductor" and model.random:
        options["fallback_random"] = True
    compile_with = {"dynamic": spec.dynamic, "fullgraph": spec.fullgraph, "options": options}
    return {
        "input_shape": spec.input_shape,
        "output_shape": spec.output_shape,
        "tied": ties(spec),
        "ids": model.takes_ids,
        "steps": spec.steps,
        "microbatches": spec.microbatches,
        "optimizer": ({"sgd": "SGD", "adamw": "AdamW"}[spec.optimizer]) if steps else "",
        "rate": LEARNING_RATE[spec.optimizer] if steps else 0.0,
        "mode": spec.grad_mode,
        "autocast": spec.autocast,
        "lifecycle": spec.lifecycle,
        "input_layout": spec.input_layout,
        "grad_layout": spec.grad_layout,
        "checkpoint": arm.checkpoint,
        "regions": model.regions,
        "compiler": arm.compiler,
        "compile_with": {k: v for k, v in compile_with.items() if v != {}} if arm.compiler else {},
    }


def _watched(verdict: Verdict, at: At) -> tuple[str, ...]:
    """The layers that the check looks at."""
    layers = (at.layer, *(given.at.layer for given in verdict.given))
    return tuple(dict.fromkeys(layer for layer in layers if layer))


def _check(verdict: Verdict, at: At, plan: Plan) -> str:
    """Looks at the address, and says whether what is there is as expected."""
    expect = verdict.expect
    lines: list[str] = []
    if isinstance(expect, Typed):
        call = f"trace.call({at.layer!r}, {at.call}, {_phase(at)!r})"
        return (
            f"got, want = {call}.outputs[{at.name!r}].dtype, {TORCH_NAME[expect.dtype]}\n"
            f'print(f"{at}: {{got}}, must be {{want}}")\nsys.exit(0 if got == want else 1)'
        )
    if at.layer:
        lines.append(f"call = trace.call({at.layer!r}, {at.call}, {_phase(at)!r})")
    if isinstance(expect, Same):
        if (expect.at.layer, expect.at.call, expect.at.run) != (verdict.at.layer, at.call, ""):
            raise ValueError(f"a player plays one run, and {expect.at} is in another")
        lines.append(f"got = {_element(at, plan)}")
        lines.append(f"call = trace.call({at.layer!r}, {at.call}, {_phase(expect.at)!r})")
        lines.append(f"want = {_element(expect.at, plan)}")
        told, holds = "as {want}", "got == want or (got != got and want != want)"
    else:
        given = [
            f"    {(g.at.layer, g.at.call, g.at.name)!r}: {int(read(g.value))},"
            for g in verdict.given
            if g.at.what == "tensor"
        ]
        lines.append(_GIVEN.format(given="\n".join(given)).strip("\n") if given else "")
        lines.append(f"got = {_element(at, plan)}")
        told = str(expect)
        if isinstance(expect, Within):
            holds = f"{read(expect.lo)!r} <= got <= {read(expect.hi)!r}".replace("inf", "math.inf")
        elif isinstance(expect, Is) and np.isnan(read(expect.value)):
            holds = "got != got"
        elif isinstance(expect, Is):
            lines.append(f"want = float.fromhex({expect.value!r})")
            holds = "got == want" + " and math.copysign(1, got) == math.copysign(1, want)" * (
                expect.signed
            )
        else:
            raise ValueError(f"a player cannot check {type(expect).__name__}")
    lines.append(f'print(f"{at}: {{got}}, must be {told}")\nsys.exit(0 if {holds} else 1)')
    return "\n".join(filter(None, lines))


def _phase(at: At) -> str:
    """The phase in which the layer was called; its gradients belong to its forward."""
    return "recompute" if at.phase == "recompute" else "forward"


def _element(at: At, plan: Plan) -> str:
    """The number at an address of ``call``, as an expression."""
    index = list(at.index)
    if at.what == "result":
        got = f"call.outputs[{at.name!r}]" if at.layer else f"trace.results[{at.name!r}]"
        return f"{_rows(got)}{index}.item()"
    if at.what == "source" and not at.side:  # what the layer was handed
        got = "call.weight" if at.name == "weight" else f"call.tensors[{at.name!r}]"
        return f"{_rows(got)}{index}.item()"
    shown = [str(role) for role in ROLES[1:] if plan.gemms[role].quantised]
    gemm = "call.forward_gemms[0]"
    if at.name != "output":
        gemm = f"call.backward_gemms[{shown.index(at.name)}]"
    if at.what == "codes":
        return f"{gemm}[{SLOT[at.side]}].float(){index}.item()"
    if at.what == "scale":
        got = f"{gemm}[{SLOT[at.side] + 1}]"
        byte = f"({got}.view(torch.uint8) if {got}.element_size() == 1 else {got})"
        return f"{byte}{index or ''}.item()"
    if at.what == "amax":
        return f"{gemm}[{4 + (at.side == 'b')}].float(){index or ''}.item()"
    raise ValueError(f"a player has no eyes for {at.what}")


def _rows(got: str) -> str:
    return f'getattr({got}, "_data", {got}).flatten(0, -2).float()'
