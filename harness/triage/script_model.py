"""repro.py for a model: its source, its data as one compressed literal, the guilty arm, a check.

What a rule found at one *layer* needs none of this: that layer's own tensors make a script of a
single linear. Here are the findings about a run as a whole.
"""

from __future__ import annotations

import base64
import inspect
import textwrap
import zlib

import numpy as np

from harness.arms import recompute
from harness.arms.ladder import Arm
from harness.case import Case, Spec
from harness.models.zoo import MODELS, source_of, tied_names
from harness.numerics.formats import F32
from harness.recipe import ScriptText
from harness.triage.script_watch import check_watched, watching
from harness.verdict import Verdict

_DTYPE = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}

_RATIO = """
def rms(t):
    return t.double().square().mean().sqrt().item()
name, part = {name!r}, {part}
exact, eager, guilty = (run(which)[name][part] for which in ("exact", "eager", "guilty"))
base, far, finite = rms(eager - exact), rms(guilty - exact), bool(guilty.isfinite().all())
print(f"{{name}}: error {{far:.4g}}, eager's {{base:.4g}}, finite: {{finite}}")
sys.exit(1 if not finite or far > {ratio} * base else 0)
"""

_EQUAL = """
def plain(t):
    return t.double().nan_to_num(nan=0.5) + 0.0
first, second = run({first!r}), run({second!r})
def same(name):
    return name in second and torch.equal(plain(first[name]), plain(second[name]))
different = [name for name in first if not same(name)]
print("different:", ", ".join(different) or "nothing")
sys.exit(1 if different else 0)
"""

_CRASH = """
try:
    run("guilty")
except Exception as error:
    text = str(error).strip() or "(no message)"
    print(f"{{phase}} raises {{type(error).__name__}}: {{text.splitlines()[0]}}")
    sys.exit({code})
print("runs forward and backward")
"""

_MISSING = """
missing = [n for n in {names!r} if n not in run("guilty")]
print("no gradient of:", ", ".join(missing) or "nothing")
sys.exit(1 if missing else 0)
"""


def write_model_script(
    case: Case, verdict: Verdict, text: ScriptText, arm: Arm, tensors: dict[str, F32]
) -> str:
    """The script's text. Raises ValueError for a rule no plain script can check."""
    spec = case.spec
    watch, watched = watching(verdict, arm)
    check = _check(verdict, arm)
    parts = [
        f'"""{_plain(verdict.sentence())}\n\n{spec.recipe}, {spec.model}, arm {verdict.arm}, rule '
        f'{verdict.oracle}. Exits 1 while this shows, 0 once it is gone.\n"""',
        "import base64\nimport collections\nimport contextlib\nimport math\nimport sys\n"
        "import zlib\n"
        "from collections import Counter\nfrom functools import partial\nfrom typing import Any\n\n"
        "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
        "from torch.utils.checkpoint import (CheckpointPolicy, checkpoint,\n"
        "                                    create_selective_checkpoint_contexts)",
        text.imports,
        f"torch.set_num_threads(1)\ndtype = {_DTYPE[spec.dtype]}",
        _budget(spec),
        source_of(spec.model),
        _recompute_source(arm),
        watch,
        _blob(tensors),
        _run(spec, arm, text, watched=watched),
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
    text = inspect.getsource(recompute)
    return (
        text[text.index("_aten = ") :]
        .replace("Callable[..., Any]", "Any")
        .replace("Callable[..., CheckpointPolicy]", "Any")
    )


def _blob(tensors: dict[str, F32]) -> str:
    """All tensors as fp32 in one zlib-compressed literal."""
    raw = b"".join(np.ascontiguousarray(t, dtype="<f4").tobytes() for t in tensors.values())
    literal = base64.b85encode(zlib.compress(raw, 9)).decode()
    lines = "\n".join(f"    {line!r}" for line in textwrap.wrap(literal, 92))
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    return (
        f"SHAPES = {shapes!r}\n"
        f"raw = bytearray(zlib.decompress(base64.b85decode(\n{lines}\n)))\n"
        "flat, tensors = torch.frombuffer(raw, dtype=torch.float32), {}\n"
        "for name, shape in SHAPES.items():\n"
        "    size = math.prod(shape)\n"
        "    tensors[name], flat = flat[:size].reshape(shape), flat[size:]"
    )


def _run(spec: Spec, arm: Arm, text: ScriptText, *, watched: bool) -> str:
    """run("guilty" | "plain" | "eager" | "exact") -> named results of the last step."""
    model = MODELS[spec.model]
    tied = tied_names(model.build(spec, dtype=recompute.torch.float32, device="meta"))
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
    optimizer = (
        "torch.optim.SGD(trained, lr=2.0**-6)"
        if spec.optimizer == "sgd"
        else "torch.optim.AdamW(trained, lr=2.0**-8)"
    )
    mode = {"train": "torch.enable_grad", "no_grad": "torch.no_grad"}.get(
        spec.grad_mode, "torch.inference_mode"
    )
    recomputed = (
        f"recomputing(model, {arm.checkpoint!r}, {model.regions!r})" if arm.checkpoint else "model"
    )
    after = 'results[name] = getattr(parameter, "_data", parameter).detach()'
    body = f"""
phase = "convert"
def build(kind, convert):
    model = {model.expression(spec)}.to(kind)
    {"model = " + text.convert + " if convert else model"}
    return model
def run(which):
    global phase
    phase, kind = "convert", torch.float64 if which == "exact" else dtype
    torch.manual_seed(0)
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
    for turn in range({spec.steps * spec.microbatches}):
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
{_backward(spec, watched)}{_step(spec)}    results = {{"output": y.detach()}}
    if x.grad is not None:
        results["grad_input"] = x.grad
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[name + ".grad"] = getattr(parameter.grad, "_data", parameter.grad)
        {after if spec.steps > 1 else "pass"}
    return results
"""
    return body.strip("\n")


def _layout(spec: Spec) -> str:
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
    elif spec.grad_layout == "expanded":
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


def _check(verdict: Verdict, arm: Arm) -> str:
    oracle = verdict.oracle
    if oracle == "contract":
        if verdict.status == "diverged":
            return _MISSING.format(names=verdict.where.split(", "))
        late = verdict.symptom.startswith("refused only in backward")
        return _CRASH.format(code='1 if phase == "backward" else 0' if late else "1")
    if oracle == "O1":
        return _EQUAL.format(first="guilty", second="guilty")
    if oracle in ("O8", "O12"):
        return _EQUAL.format(first="eager", second="guilty")
    if oracle == "O9":
        name, _, row = verdict.where.partition(" row ")
        return _RATIO.format(name=name.split("[")[0], part=row or "...", ratio=10 if row else 2)
    if oracle in ("O13", "O18"):
        return check_watched(verdict, arm)
    raise ValueError(f"no stand-alone script for {oracle} on a model")
