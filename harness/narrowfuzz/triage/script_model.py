"""repro.py for a model: its source, its data as one compressed literal, the guilty arm, a check.

What a rule found at one *layer* needs none of this: that layer's own tensors make a script of a
single linear. Here are the findings about a run as a whole.
"""

from __future__ import annotations

from narrowfuzz.arms.ladder import Arm
from narrowfuzz.case import LEARNING_RATE, Case, Spec
from narrowfuzz.models.zoo import MODELS, source_of, ties
from narrowfuzz.numerics.formats import F32
from narrowfuzz.play import checkpoint
from narrowfuzz.recipe import ScriptText
from narrowfuzz.triage.paste import pasted
from narrowfuzz.triage.script_model_checks import check_whole
from narrowfuzz.triage.script_parts import GUARD, NATIVE, blob
from narrowfuzz.triage.script_watch import check_watched, watching
from narrowfuzz.verdict import Verdict

_DTYPE = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


def write_model_script(
    case: Case, verdict: Verdict, text: ScriptText, arm: Arm, tensors: dict[str, F32]
) -> str:
    """The script's text. Raises ValueError for a rule no plain script can check."""
    spec = case.spec
    watch, watched = watching(verdict, arm)
    check = check_watched(verdict, arm) if watch else check_whole(spec, verdict)
    parts = [
        f'"""{_plain(verdict.sentence())}\n\n{spec.recipe}, {spec.model}, arm {verdict.arm}, rule '
        f"{verdict.oracle}. Exits 1 while this shows, 0 once it is gone, 125 if it cannot tell."
        '\n"""',
        "import base64, collections, contextlib, copy, ctypes, math, os, re, sys, zlib\n"
        "from collections import Counter\nfrom functools import partial\nfrom typing import Any\n"
        f"{GUARD}\n"
        "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
        "from torch.utils.checkpoint import (CheckpointPolicy, checkpoint,\n"
        "                                    create_selective_checkpoint_contexts)",
        text.imports,
        f"torch.set_num_threads(1)\ndtype = {_DTYPE[spec.dtype]}",
        _budget(spec),
        source_of(spec.model),
        _recompute_source(arm),
        watch,
        blob(tensors),
        _run(spec, arm, verdict, text, watched=watched),
        check,
    ]
    return "\n".join(part.strip("\n") for part in parts if part) + "\n"


def _plain(sentence: str) -> str:
    return sentence.replace("\\", "\\\\").replace('"""', "'''").replace("\0", "\\0")


def _budget(spec: Spec) -> str:
    if spec.memory_budget == 100:
        return ""
    return (
        "import torch._functorch.config\n"
        f"torch._functorch.config.activation_memory_budget = {spec.memory_budget / 100}"
    )


def _recompute_source(arm: Arm) -> str:
    if not arm.checkpoint:
        return ""
    return pasted(("recomputing", arm.checkpoint), (checkpoint,))


def _run(spec: Spec, arm: Arm, verdict: Verdict, text: ScriptText, *, watched: bool) -> str:
    """run("guilty" | "plain" | "eager" | "exact") -> named results of the last step, of all its
    microbatches or of those in ``turns``."""
    model = MODELS[spec.model]
    tied = ties(spec)
    options = dict(arm.options) | (
        {"fallback_random": True} if model.random and arm.compiler == "inductor" else {}
    )
    compiled = (
        f'torch.compile(call, backend="{arm.compiler}", dynamic={spec.dynamic}, '
        f"fullgraph={spec.fullgraph}" + (f", options={options})" if options else ")")
    )
    x = "rows.long()" if model.takes_ids else "rows.to(kind)"
    shape = spec.input_shape[:-1] if model.takes_ids else spec.input_shape
    x = f"{x}.reshape({shape})"
    leaf = "" if model.takes_ids or not spec.trains else ".requires_grad_(True)"
    kind = "SGD" if spec.optimizer == "sgd" else "AdamW"
    optimizer = f"torch.optim.{kind}(trained, lr={LEARNING_RATE[spec.optimizer]})"
    mode = {"train": "torch.enable_grad", "no_grad": "torch.no_grad"}.get(
        spec.grad_mode, "torch.inference_mode"
    )
    recomputed = (
        f"recomputing(model, {arm.checkpoint}, {model.regions!r})" if arm.checkpoint else "model"
    )
    off = NATIVE.replace("\n", "\n    ")
    if verdict.oracle in ("O8", "O9"):  # oneDNN's kernels are what the arm is compared with
        off = off.replace("False", "which != 'guilty'")
    after = 'results[name] = getattr(parameter, "_data", parameter).detach()'
    body = f"""
phase = "convert"
def build(kind, convert):
    model = {model.expression(spec)}.to(kind)
    {"model = " + text.convert + " if convert else model"}
{_lifecycle(spec, text)}    return model
def run(which, turns=range({spec.steps * spec.microbatches})):
    global phase
    phase, kind = "convert", torch.float64 if which == "exact" else dtype{off * arm.native}
    model, tied = build(kind, which != "exact"), {tied!r}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[tied.get(name, name)].to(kind))
    call = model
    if which == "guilty":
        call = {recomputed}
        call = {compiled if arm.compiler else "call"}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = {optimizer}
    torch.manual_seed(0)
    for turn in turns:
        if turn and turn % {spec.microbatches} == 0:
            optimizer.zero_grad()
        rows = tensors["input"].roll(turn, 0)
        x = {x}
{_layout(spec)}        x = x.detach(){leaf}
        phase = "forward"
        narrow = torch.autocast("cpu", torch.bfloat16, enabled={spec.autocast} and kind == dtype)
        with {mode}(), narrow:
            with {"Watch()" if watched else "contextlib.nullcontext()"}:
                y = call(x if x.is_leaf and not x.requires_grad else x.view_as(x))
{_backward(spec, watched)}{_step(spec)}    results = {{"output": y.detach().flatten(0, -2)}}
    if x.grad is not None:
        results["grad_input"] = x.grad.flatten(0, -2)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[name + ".grad"] = getattr(parameter.grad, "_data", parameter.grad)
        {after if spec.steps > 1 else "pass"}
    return results
"""
    return body.strip("\n")


def _lifecycle(spec: Spec, text: ScriptText) -> str:
    """What happens to the converted model before its first run."""
    if spec.lifecycle == "deepcopy":
        return "    model = copy.deepcopy(model) if convert else model\n"
    if spec.lifecycle == "reload":
        return (
            "    if convert:\n"
            f"        state, model = model.state_dict(), {MODELS[spec.model].expression(spec)}\n"
            f"        model = model.to(kind)\n        model = {text.convert}\n"
            "        model.load_state_dict(state)\n"
        )
    return ""


def _layout(spec: Spec) -> str:
    if MODELS[spec.model].takes_ids:
        return ""
    if spec.input_layout == "transposed":
        return "        x = x.transpose(-1, -2).contiguous().transpose(-1, -2)\n"
    if spec.input_layout == "strided":
        return (
            "        wide = torch.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype)\n"
            "        wide[..., ::2] = x\n        x = wide[..., ::2]\n"
        )
    return ""


def _backward(spec: Spec, watched: bool) -> str:
    if not spec.trains:
        return ""
    g = f'tensors["grad_output"].reshape({spec.output_shape})'
    if spec.grad_layout == "transposed":
        g += ".transpose(-1, -2).contiguous().transpose(-1, -2)"
    elif spec.grad_layout == "expanded" and spec.tokens:
        g = f'tensors["grad_output"][0].expand({spec.output_shape})'
    context = "Watch()" if watched else "contextlib.nullcontext()"
    return (
        f'        phase = "backward"\n        with {context}:\n'
        f"            y.backward({g}.to(y.dtype))\n"
    )


def _step(spec: Spec) -> str:
    if spec.steps == 1 or not spec.trains:
        return ""
    return f"        if (turn + 1) % {spec.microbatches} == 0:\n            optimizer.step()\n"
