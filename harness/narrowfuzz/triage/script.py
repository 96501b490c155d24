"""repro.py: a stand-alone script for one finding, importing torch and the library under test only.

It builds the layer, loads literal data, runs the guilty arm and checks the one element (or the one
property) that the rule was broken at. Exit code 1: the divergence is there. 0: it is gone.
"""

from __future__ import annotations

import msgspec

from narrowfuzz.arms.ladder import BY_NAME, Arm
from narrowfuzz.case import Case, Spec
from narrowfuzz.judge import tensors_of
from narrowfuzz.models.zoo import MODELS, source_of
from narrowfuzz.numerics.formats import F32
from narrowfuzz.recipe import Recipe, ScriptText
from narrowfuzz.triage.script_census import TORCH_NAME, quoted, write_census_script
from narrowfuzz.triage.script_checks import check_rule
from narrowfuzz.triage.script_model import write_model_script
from narrowfuzz.triage.script_parts import GUARD, NATIVE, OF_LINEAR, hex_rows, layouts, sites
from narrowfuzz.triage.script_relations import RERUN, VARIANTS, check_relation, rerun_function
from narrowfuzz.triage.script_values import check_values
from narrowfuzz.triage.script_watch import inside
from narrowfuzz.verdict import Verdict

_WATCH = """
from torch.utils._python_dispatch import TorchDispatchMode
class Watch(TorchDispatchMode, contextlib.ContextDecorator):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kw, op = kwargs or {}, str(func.overloadpacket)
        if op in ("aten._scaled_mm", "aten._scaled_mm_v2"):
            one = (*args[2:4], kw.get("scale_a"), kw.get("scale_b"))
            scales = [s for s in (args[2] + args[5] if "v2" in op else one) if s is not None]
            seen.append([t.clone() for t in (args[0], scales[0], args[1].t(), scales[1].t())])
        elif op == "aten.mm":
            seen.append((args[0].clone(), None, args[1].t().clone(), None))
        return func(*args, **kw)
"""


def write_script(
    case: Case,
    verdict: Verdict,
    recipe: Recipe,
    layer: tuple[Spec, dict[str, F32]] | None = None,
) -> str:
    """The script's text. Raises ValueError for a finding no script can show by itself.

    What was found at one ``layer`` of a model is shown by a single linear with that layer's own
    tensors; what was found about a model's whole run, by the model.
    """
    arm = BY_NAME[verdict.arm]
    if verdict.oracle == "census":
        return write_census_script(case, verdict, recipe, *_model_source(case.spec))
    tensors = tensors_of(case, recipe)
    if verdict.oracle == "O13" and not verdict.at.side:
        layer = None  # this layer was handed something else: what did it is elsewhere in the model
    if layer is not None:
        case, tensors = msgspec.structs.replace(case, spec=layer[0]), layer[1]
    elif _needs_model(case.spec, verdict, arm):
        if case.spec.direct:
            tensors = {OF_LINEAR.get(name, name): t for name, t in tensors.items()}
        return write_model_script(case, verdict, recipe.script(case.spec), arm, tensors)
    text = recipe.script(case.spec)
    needs_tap = verdict.oracle in _TAPPED or (verdict.oracle in VARIANTS and verdict.at.side != "")
    tap = (_WATCH + inside(arm) if arm.compiler else text.tap) if needs_tap else ""
    parts = [
        f'"""{quoted(verdict.sentence())}\n\n'
        f"{case.spec.recipe}, arm {verdict.arm}, rule {verdict.oracle}."
        ' Exits 1 while this shows, 0 once it is gone, 125 if it cannot tell.\n"""',
        f"import collections, contextlib, ctypes, io, math, os, re, sys\n{GUARD}\n"
        "import torch" + ("\nimport torch.utils.checkpoint" if arm.checkpoint else ""),
        text.imports,
        f"torch.set_num_threads(1)\ndtype = {TORCH_NAME[case.spec.dtype]}" + NATIVE * arm.native,
        "def tensor(*rows):\n"
        "    flat = bytearray.fromhex(''.join(rows))\n"
        "    return torch.frombuffer(flat, dtype=dtype).reshape(len(rows), -1).clone()"
        if all(t.size for t in tensors.values())
        else "def tensor(rows, cols):\n    return torch.zeros(rows, cols, dtype=dtype)",
        _literals(tensors, case.spec)
        + ("" if "grad_output" in tensors else "\ngrad_output = None  # none came back"),
        f"{sites(recipe.plan(case.spec), arm)}\nseen = []\n{tap.strip()}" if needs_tap else "",
        rerun_function(case.spec, text, verdict.oracle)
        if verdict.oracle in RERUN
        else _run_function(case.spec, arm, text, "grad_output" in tensors),
        check_rule(verdict)
        or check_relation(case, verdict, recipe.plan(case.spec), tensors)
        or check_values(case, verdict, recipe, tensors),
    ]
    return "\n".join(part.strip("\n") for part in parts if part) + "\n"


def _needs_model(spec: Spec, verdict: Verdict, arm: Arm) -> bool:
    """True where a single linear, run forward and backward once, does not tell the story."""
    special = spec.dynamic or spec.fullgraph or spec.lifecycle != "none" or not spec.trains
    mixed = arm.checkpoint == "selective" or bool(arm.compiler and arm.checkpoint)
    handed = verdict.oracle == "O13" and not verdict.at.side
    return not spec.direct or special or mixed or handed or verdict.oracle == "O8"


#: Rules that look at operands.
_TAPPED = ("O2", "O3", "O4", "O13", "R12", "R13", "R14", "R15", "R21", "R22")


def _model_source(spec: Spec) -> tuple[str, str]:
    """Source that assigns ``model``, and its imports; empty for a single linear."""
    if spec.model == "linear":
        return "", ""
    imports = (
        "import math\nfrom typing import Any\nimport torch.nn.functional as F\nfrom torch import nn"
    )
    build = f"model = {MODELS[spec.model].expression(spec)}.to({TORCH_NAME[spec.dtype]})"
    return f"{source_of(spec.model)}\n\n\n{build}", imports


def _literals(tensors: dict[str, F32], spec: Spec) -> str:
    lines = []
    for name, values in tensors.items():
        rows = values.reshape(1, -1) if values.ndim == 1 else values
        if not all(t.size for t in tensors.values()):
            lines.append(f"{name} = tensor({rows.shape[0]}, {rows.shape[1]})")
            continue
        lines.append(f"{name} = tensor(\n{hex_rows(rows, spec.dtype)}\n)")
    return "\n".join(lines)


def _run_function(spec: Spec, arm: Arm, text: ScriptText, gradient: bool = True) -> str:
    """run(input, weight, grad_output) -> results by role; ``phase`` says how far it came. Without
    a ``gradient`` the layer runs forward only, as it did."""
    m, k, n = spec.tokens, spec.k, spec.n
    shape_in, shape_out = tuple(spec.input_shape), tuple(spec.output_shape)
    load_bias = "        model.proj.bias.copy_(bias.reshape(-1))\n" if spec.bias else ""
    forward = f"""\
    phase = "forward"
    y = {_call(arm)}
"""
    ends = f"""\
    x = input.reshape({shape_in})
    with torch.no_grad():
    {forward.replace(chr(10), chr(10) + "    ").rstrip()}
    return dict(output=y.reshape({m}, {n}))
"""
    if gradient:
        ends = f"""\
    x, g = input.reshape({shape_in}), grad_output.reshape({shape_out})
{layouts(spec)}    x = x.detach().requires_grad_(True)
{forward}    phase = "backward"
    y.backward(g)
    w, b = model.proj.weight.grad, model.proj.bias
    return dict(output=y.detach().reshape({m}, {n}), grad_input=x.grad.reshape({m}, {k}),
                grad_weight=getattr(w, "_data", w), grad_bias=None if b is None else b.grad)
"""
    body = f"""
phase = "convert"
def run(input, weight, grad_output, checkpointed={bool(arm.checkpoint)}):
    global phase
    model = torch.nn.Sequential(collections.OrderedDict(
        proj=torch.nn.Linear({spec.k}, {spec.n}, {spec.bias}, dtype=dtype)))
    model = {text.convert}
    with torch.no_grad():
        model.proj.weight.copy_(weight)
{load_bias}{ends}"""
    return body.strip("\n")


def _call(arm: Arm) -> str:
    if arm.compiler:
        options = f", options={dict(arm.options)}" if arm.options else ""
        return f'torch.compile(model, backend="{arm.compiler}", dynamic=False{options})(x)'
    if arm.checkpoint:
        reentrant = arm.checkpoint == "reentrant"
        return (
            "(torch.utils.checkpoint.checkpoint(model, x, use_reentrant="
            f"{reentrant}) if checkpointed else model(x))"
        )
    return "model(x)"
