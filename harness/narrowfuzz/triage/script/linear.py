"""The short script of a single linear: its data as rows of hexadecimal, the recipe's own
conversion, one run and one check."""

from __future__ import annotations

from narrowfuzz.arms.available import options_on
from narrowfuzz.case.arm import Arm
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.numerics.formats import E2M1
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.script.element import TAPPED
from narrowfuzz.triage.script.parts import TORCH_NAME, Tensors, hex_rows, layouts, sites
from narrowfuzz.triage.script.recipe_source import recipe_source
from narrowfuzz.triage.script.short import Short


def of_linear(
    case: Case, verdict: Verdict, recipe: Recipe, tensors: Tensors, check: str, device: str
) -> Short:
    """The script of a single linear on these tensors, with a ``check`` (``short_check.py``)."""
    arm, tapped = BY_NAME[verdict.arm], needs_tap(verdict)
    imports = "import collections, contextlib, ctypes, math, re\nimport torch"
    imports += "\nimport torch.utils.checkpoint" * bool(arm.checkpoint)
    sets = f"torch.set_num_threads({case.spec.threads})\ndevice = {device!r}"
    sets += f"\ndtype = {TORCH_NAME[case.spec.dtype]}"
    sets += "\ntorch.backends.mkldnn.enabled = False" * arm.native
    return Short(
        verdict,
        case.spec.recipe,
        f"{imports}\n{sets}",
        (
            _FROM_HEX if all(t.size for t in tensors.values()) else _ZEROS,
            _literals(tensors, case.spec),
            "" if "grad_output" in tensors else "grad_output = None  # none came back",
            recipe_source(recipe, case.spec, "convert", *(("tap",) if tapped else ())),
            f"{sites(recipe.plan(case.spec))}\n{_seen(recipe, case.spec)}" if tapped else "",
            _run_function(case.spec, arm, device, "grad_output" in tensors),
            check,
        ),
    )


_FROM_HEX = """\
def tensor(*rows):
    flat = bytearray.fromhex(''.join(rows))
    return torch.frombuffer(flat, dtype=dtype).reshape(len(rows), -1).clone().to(device)"""
_ZEROS = """\
def tensor(rows, cols):
    return torch.zeros(rows, cols, dtype=dtype, device=device)"""
_SEEN = """seen = []
tapping = tap(lambda *gemm: seen.append([t.clone() if hasattr(t, "clone") else t for t in gemm]))
tapping.__enter__()"""
#: E2M1's codes are recorded as integers, and with two levels of scales. ``seen`` stores the values
#: of the codes, and the scales of blocks.
_SEEN_IN_TWO_LEVELS = f"""seen, e2m1 = [], torch.tensor({E2M1.table.tolist()})
def plain(t):
    t = t[0] if isinstance(t, tuple) else t
    return e2m1[t.long()] if t is not None and t.dtype == torch.uint8 else t
tapping = tap(lambda *gemm: seen.append([plain(t) for t in gemm]))
tapping.__enter__()"""


def _seen(recipe: Recipe, spec: Spec) -> str:
    gemms = recipe.plan(spec).gemms.values()
    return _SEEN_IN_TWO_LEVELS if any(gemm.a.format == E2M1 for gemm in gemms) else _SEEN


def needs_tap(verdict: Verdict) -> bool:
    """Is the verdict about the operands of a multiply, or about a recompute?"""
    return verdict.at.what in (*TAPPED, "source") or verdict.at.phase == "recompute"


def _literals(tensors: Tensors, spec: Spec) -> str:
    lines = []
    for name, values in tensors.items():
        rows = values.reshape(1, -1) if values.ndim == 1 else values
        if not all(t.size for t in tensors.values()):
            lines.append(f"{name} = tensor({rows.shape[0]}, {rows.shape[1]})")
            continue
        lines.append(f"{name} = tensor(\n{hex_rows(rows, spec.dtype)}\n)")
    return "\n".join(lines)


def _run_function(spec: Spec, arm: Arm, device: str, gradient: bool) -> str:
    """Source of run(input, weight, grad_output), which returns results by role and sets ``phase``
    to how far it came. Without a ``gradient`` the layer runs forward only, as in the case."""
    m, k, n = spec.tokens, spec.k, spec.n
    shape_in, shape_out = tuple(spec.input_shape), tuple(spec.output_shape)
    load_bias = "        model.proj.bias.copy_(bias.reshape(-1))\n" if spec.bias else ""
    forward = f"""\
    phase = "forward"
    y = {_call(arm, device)}
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
        proj=torch.nn.Linear({spec.k}, {spec.n}, {spec.bias}, device=device, dtype=dtype)))
    model = convert(model)
    with torch.no_grad():
        model.proj.weight.copy_(weight)
{load_bias}{ends}"""
    return body.strip("\n")


def _call(arm: Arm, device: str) -> str:
    if arm.compiler:
        given = options_on(arm, device)
        options = f", options={given}" if given else ""
        return f'torch.compile(model, backend="{arm.compiler}", dynamic=False{options})(x)'
    if arm.checkpoint:
        reentrant = arm.checkpoint == "reentrant"
        return (
            "(torch.utils.checkpoint.checkpoint(model, x, use_reentrant="
            f"{reentrant}) if checkpointed else model(x))"
        )
    return "model(x)"


def is_plain(spec: Spec, verdict: Verdict, arm: Arm) -> bool:
    """True if a short script, which runs a single linear once, can show the verdict."""
    special = spec.dynamic or spec.fullgraph or spec.lifecycle != "none" or not spec.trains
    special = special or spec.weight_layout != "contiguous"
    mixed = arm.checkpoint == "selective" or bool(arm.compiler and arm.checkpoint)
    inside = bool(arm.compiler) and needs_tap(verdict)
    given = verdict.at.phase == "recompute" and not verdict.at.side
    return spec.direct and not (special or mixed or inside or given)
