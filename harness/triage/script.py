"""repro.py: a stand-alone script for one finding, importing torch and the library under test only.

It builds the layer, loads literal data, runs the guilty arm and checks the one element (or the one
property) that the rule was broken at. Exit code 1: the divergence is there. 0: it is gone.
"""

from __future__ import annotations

import textwrap

import msgspec
import numpy as np

from harness.arms.ladder import BY_NAME, Arm
from harness.case import Case, Spec
from harness.data import make_tensors
from harness.numerics.formats import F32
from harness.numerics.plan import ROLES, OperandPlan
from harness.numerics.reference import canonical_operands
from harness.oracles.relations import (
    SCALED_BY,
    SCALES,
    move_below_amax,
    replace_row,
    scaling_exponent,
)
from harness.recipe import Recipe, ScriptText
from harness.verdict import Verdict

_TORCH = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}

_COMPILED_TAP = """
from torch._inductor.output_code import CompiledFxGraph
from torch.utils._python_dispatch import TorchDispatchMode
class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kw, op = kwargs or {}, str(func.overloadpacket)
        if op in ("aten._scaled_mm", "aten._scaled_mm_v2"):
            one = (*args[2:4], kw.get("scale_a"), kw.get("scale_b"))
            scales = [s for s in (args[2] + args[5] if "v2" in op else one) if s is not None]
            seen.append([t.clone() for t in (args[0], scales[0], args[1].t(), scales[1].t())])
        elif op == "aten.mm":
            seen.append((args[0].clone(), None, args[1].t().clone(), None))
        return func(*args, **kw)
def watched(self, inputs, call=CompiledFxGraph.__call__):
    with Watch():
        return call(self, inputs)
CompiledFxGraph.__call__ = watched
"""


def write_script(case: Case, verdict: Verdict, recipe: Recipe) -> str:
    """The script's text. Raises ValueError for a finding no script can show by itself."""
    text, arm = recipe.script(case.spec), BY_NAME[verdict.arm]
    tensors = make_tensors(case, recipe.plan(case.spec))
    needs_tap = verdict.oracle in ("O2", "O3", "O4", "O13", "R12", "R13", "R14", "R15")
    if needs_tap and arm.compiler == "aot_eager":
        raise ValueError("operands inside aot_eager's graphs are out of a plain script's reach")
    tap = (_COMPILED_TAP if arm.compiler else text.tap) if needs_tap else ""
    parts = [
        f'"""{_quoted(verdict.sentence())}\n\n'
        f"{case.spec.recipe}, arm {verdict.arm}, rule {verdict.oracle}."
        ' Exits 1 while this shows, 0 once it is gone.\n"""',
        "import collections\nimport math\nimport sys\n\n"
        "import torch" + ("\nimport torch.utils.checkpoint" if arm.checkpoint else ""),
        text.imports,
        f"torch.set_num_threads(1)\ndtype = {_TORCH[case.spec.dtype]}",
        "def tensor(*rows):\n"
        "    flat = bytearray.fromhex(''.join(rows))\n"
        "    return torch.frombuffer(flat, dtype=dtype).reshape(len(rows), -1).clone()"
        if all(t.size for t in tensors.values())
        else "def tensor(rows, cols):\n    return torch.zeros(rows, cols, dtype=dtype)",
        _literals(tensors, case.spec),
        "seen = []\n" + tap.strip() if needs_tap else "",
        _run_function(case.spec, arm, text),
        _check(case, verdict, recipe, tensors),
    ]
    return "\n".join(part.strip("\n") for part in parts if part) + "\n"


def _quoted(text: str) -> str:
    """Text that may stand between triple quotes, whatever a library said."""
    return text.replace("\\", "\\\\").replace('"""', "'''").replace("\0", "\\0")


def _literals(tensors: dict[str, F32], spec: Spec) -> str:
    lines = []
    for name, values in tensors.items():
        rows = values.reshape(1, -1) if values.ndim == 1 else values
        if not all(t.size for t in tensors.values()):
            lines.append(f"{name} = tensor({rows.shape[0]}, {rows.shape[1]})")
            continue
        body = "\n".join(f'    "{_hex(row, spec.dtype)}",' for row in rows)
        lines.append(f"{name} = tensor(\n{body}\n)")
    return "\n".join(lines)


def _hex(row: F32, dtype: str) -> str:
    bits = np.ascontiguousarray(row, dtype=np.float32).view(np.uint32)
    if dtype == "bf16":
        return (bits >> np.uint32(16)).astype("<u2").tobytes().hex()
    return bits.astype("<u4").tobytes().hex()


def _run_function(spec: Spec, arm: Arm, text: ScriptText) -> str:
    """run(input, weight, grad_output) -> results by role; ``phase`` says how far it came."""
    m, k, n = spec.tokens, spec.k, spec.n
    shape_in, shape_out = tuple(spec.input_shape), tuple(spec.output_shape)
    load_bias = "        model.proj.bias.copy_(bias.reshape(-1))\n" if spec.bias else ""
    body = f"""
phase = "convert"
def run(input, weight, grad_output, checkpointed={bool(arm.checkpoint)}):
    global phase
    model = torch.nn.Sequential(collections.OrderedDict(
        proj=torch.nn.Linear({spec.k}, {spec.n}, {spec.bias}, dtype=dtype)))
    model = {text.convert}
    with torch.no_grad():
        model.proj.weight.copy_(weight)
{load_bias}    x, g = input.reshape({shape_in}), grad_output.reshape({shape_out})
{_layouts(spec)}    x = x.detach().requires_grad_(True)
    phase = "forward"
    y = {_call(arm)}
    phase = "backward"
    y.backward(g)
    w, b = model.proj.weight.grad, model.proj.bias
    return dict(output=y.detach().reshape({m}, {n}), grad_input=x.grad.reshape({m}, {k}),
                grad_weight=getattr(w, "_data", w), grad_bias=None if b is None else b.grad)
"""
    return body.strip("\n")


def _layouts(spec: Spec) -> str:
    lines = {
        "transposed": "    {0} = {0}.transpose(-1, -2).contiguous().transpose(-1, -2)\n",
        "strided": "    wide = torch.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=dtype)\n"
        "    wide[..., ::2] = x\n    x = wide[..., ::2]\n",
        "contiguous": "",
    }
    text = lines[spec.input_layout].format("x")
    if spec.grad_layout == "expanded":
        return text + (
            f"    g = grad_output[0].expand({spec.output_shape})\n" if spec.tokens else ""
        )
    return text + lines[spec.grad_layout].format("g")


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


def _check(case: Case, verdict: Verdict, recipe: Recipe, tensors: dict[str, F32]) -> str:
    oracle = verdict.oracle
    if oracle == "contract":
        return _check_contract(verdict)
    if oracle in ("O5", "O15", "O6", "O7", "O10", "O11"):
        return _check_element(verdict)
    if oracle in ("O2", "O3", "O4"):
        return _check_operand(verdict, _site(case, verdict, recipe))
    if oracle == "O1":
        return _check_equal(
            "runs = [run(input, weight, grad_output) for _ in range(20)]",
            "runs[0]", "next((r for r in runs if not same(r, runs[0])), runs[0])", verdict.role,
        )  # fmt: skip
    if oracle == "O12":
        return _check_equal(
            "plain = run(input, weight, grad_output, checkpointed=False)",
            "plain", "run(input, weight, grad_output)", verdict.role,
        )  # fmt: skip
    if oracle == "O13":
        return (
            "def bits(t):\n"
            "    t = t.flatten().clone(memory_format=torch.contiguous_format)\n"
            "    return t.view(torch.uint8)\n"
            "run(input, weight, grad_output)\n"
            "raw = [[bits(t) for t in site] for site in seen[:2]]\n"
            "same = all(torch.equal(x, y) for x, y in zip(*raw))\n"
            'print("codes, scales of forward and recompute:", "equal" if same else "DIFFERENT")\n'
            "sys.exit(0 if same else 1)"
        )
    return _check_relation(case, verdict, recipe, tensors)


def _check_contract(verdict: Verdict) -> str:
    if verdict.status == "diverged":
        name = verdict.symptom.split()[-1]
        return (
            f'missing = run(input, weight, grad_output)["{name}"] is None\n'
            f'print("{name}:", "None although its parameter requires a gradient" if missing else '
            '"there")\nsys.exit(1 if missing else 0)'
        )
    code = "1"
    if verdict.symptom.startswith("refused only in backward"):
        code = '1 if phase == "backward" else 0'
    elif verdict.symptom.startswith("refusal names no layer"):
        code = '1 if "proj" not in str(error) else 0'
    return textwrap.dedent(f"""
        try:
            run(input, weight, grad_output)
        except Exception as error:
            text = str(error).strip() or "(no message)"
            print(f"{{phase}} raises {{type(error).__name__}}: {{text.splitlines()[0]}}")
            sys.exit({code})
        print("runs forward and backward")
    """)


def _check_element(verdict: Verdict) -> str:
    index = list(verdict.index)
    if np.isnan(verdict.lo):
        allowed, condition = "NaN", "math.isnan(got)"
    else:
        lo, hi = float(verdict.lo), float(verdict.hi)
        allowed = f"in [{lo!r}, {hi!r}]"
        condition = f'float("{lo!r}") <= got <= float("{hi!r}")'
    return (
        f'got = run(input, weight, grad_output)["{verdict.role}"]{index}.item()\n'
        f'print("{verdict.role}{index}:", got, "must be {allowed}")\n'
        f"sys.exit(0 if {condition} else 1)"
    )


def _site(case: Case, verdict: Verdict, recipe: Recipe) -> int:
    """Where in ``seen`` the verdict's GEMM stands; counted from the end, past any recompute."""
    gemms = recipe.plan(case.spec).gemms
    # inside a compiled artefact a multiply in high precision is seen too
    shown = [r for r in ROLES if gemms[r].quantised or BY_NAME[verdict.arm].compiler]
    at = [str(role) for role in shown].index(verdict.role)
    return at - len(shown) if at else 0


def _check_operand(verdict: Verdict, site: int) -> str:
    """The code, scale or amax one GEMM saw, against the rule's value."""
    slot = {"a": 0, "b": 2}[verdict.side] + (1 if verdict.oracle == "O3" else 0)
    index = f"[{', '.join(map(str, verdict.index))}]" if verdict.index else ""
    expected = verdict.allowed.split()[0].removeprefix("byte")
    if verdict.oracle == "O4":
        slot = {"a": 4, "b": 5}[verdict.side]
    if verdict.oracle == "O3":
        expected = verdict.allowed.replace("byte ", "").split()[0]
        read = f"seen[{site}][{slot}]"
        read = f"({read}.view(torch.uint8) if {read}.element_size() == 1 else {read}){index}.item()"
    else:
        read = f"seen[{site}][{slot}].float(){index}.item()"
    return (
        "run(input, weight, grad_output)\n"
        f"got = {read}\n"
        f'expected = float("{expected}")\n'
        f'print("{verdict.where}:", got, "must be {verdict.allowed}")\n'
        "sys.exit(0 if got == expected or (math.isnan(got) and math.isnan(expected)) else 1)"
    )


_SAME = """
def plain(t):
    return torch.zeros(0) if t is None else t.nan_to_num(nan=0.5)
def same(x, y):
    return all(torch.equal(plain(x[role]), plain(y[role])) for role in x)
"""


def _check_equal(setup: str, before: str, after: str, role: str) -> str:
    return (
        f"{_SAME.strip()}\n{setup}\nbefore, after = {before}, {after}\n"
        f'print("{role}:", "equal" if same(before, after) else "DIFFERENT")\n'
        "sys.exit(0 if same(before, after) else 1)"
    )


def _check_relation(case: Case, verdict: Verdict, recipe: Recipe, tensors: dict[str, F32]) -> str:
    name, role, seed = verdict.oracle, verdict.role, case.data.seed
    base = "base = run(input, weight, grad_output)\n"
    tail = (
        "\nequal = torch.equal(got.nan_to_num(nan=0.5) + 0.0, want.nan_to_num(nan=0.5) + 0.0)\n"
        f'print("{name} {role}:", "holds" if equal else "BROKEN")\n'
        "sys.exit(0 if equal else 1)"
    )
    by_name = {relation: tensor for tensor, relation in SCALED_BY.items()}
    if name in by_name:
        tensor, k = by_name[name], scaling_exponent(seed)
        factor = 2.0 ** (k * SCALES[tensor][role])  # type: ignore[index]
        args = ", ".join(
            f"{t} * {2.0**k}" if t == tensor else t for t in ("input", "weight", "grad_output")
        )
        return f'{base}got = run({args})["{role}"]\nwant = base["{role}"] * {factor}{tail}'
    if name == "R4":
        sign = "" if role == "grad_input" else "-"
        got = f'got = run(-input, weight, grad_output)["{role}"]'
        return f'{base}{got}\nwant = {sign}base["{role}"]{tail}'
    if name == "R17":
        flat = msgspec.structs.replace(
            case.spec, batch=0, m=case.spec.tokens, input_layout="contiguous",
            grad_layout="contiguous",
        )  # fmt: skip
        again = _run_function(flat, BY_NAME[verdict.arm], recipe.script(flat))
        again = "\n".join(line for line in again.splitlines() if " phase" not in f" {line}")
        again = again.replace("def run(", "def run_flat(")
        got = f'got = run_flat(input, weight, grad_output)["{role}"]'
        return f'{again}\n{base}{got}\nwant = base["{role}"]{tail}'
    a, _ = canonical_operands("output", tensors)
    plan = recipe.plan(case.spec).gemms["output"].a
    if name in ("R14", "R15"):
        moved = (
            move_below_amax(a, plan, seed)
            if name == "R14"
            else replace_row(a, seed, case.spec.dtype)
        )
        assert moved is not None
        rows = "\n".join(f'    "{_hex(row, case.spec.dtype)}",' for row in moved)
        keep = "moved == input" if name == "R14" else "(moved == input).all(1, keepdim=True)"
        return (
            f"moved = tensor(\n{rows}\n)\nrun(input, weight, grad_output)\n"
            "want = seen[0][0].float()\nseen.clear()\n"
            "run(moved, weight, grad_output)\ngot = seen[0][0].float()\n"
            f"keep = {keep}\ngot, want = got * keep, want * keep{tail}"
        )
    if name == "R12":
        block = plan.block
        factor_of_byte = "torch.exp2(s.view(torch.uint8).double() - 127)"
        value = (
            f"c.float() * {factor_of_byte}.repeat_interleave({block}, 1)"
            if block
            else "c.double() / s.double()"
        )
        return (
            f"def value(c, s):\n    return ({value}).double()\n"
            "run(input, weight, grad_output)\nwant = value(*seen[0][:2])\nseen.clear()\n"
            f"run(want.to(dtype), weight, grad_output)\ngot = value(*seen[0][:2]){tail}"
        )
    if name == "R13":
        site = _site(case, verdict, recipe)
        operand = recipe.plan(case.spec).gemms[verdict.role]  # type: ignore[index]
        plan = operand.a if verdict.side == "a" else operand.b
        return _check_monotone(verdict, site, plan, tail)
    raise ValueError(f"no stand-alone script for {name}")


def _check_monotone(verdict: Verdict, site: int, plan: OperandPlan, tail: str) -> str:
    block = plan.block
    granules = {
        "tensor": "reshape(1, -1)",
        "row": "reshape(len(x), -1)",
        "block": f"reshape(-1, {block})",
        "tile": f"unfold(0, {block}, {block}).unfold(1, {block}, {block}).reshape(-1, {block**2})",
    }[plan.granularity]
    tensors = {
        ("output", "a"): "input", ("output", "b"): "weight",
        ("grad_input", "a"): "grad_output", ("grad_input", "b"): "weight.t()",
        ("grad_weight", "a"): "grad_output.t()", ("grad_weight", "b"): "input.t()",
    }  # fmt: skip
    slot = {"a": 0, "b": 2}[verdict.side]
    return (
        f"run(input, weight, grad_output)\nx = {tensors[verdict.role, verdict.side]}\n"
        f"codes = seen[{site}][{slot}].float().{granules}\n"
        f"order = x.{granules}.float().argsort(1, stable=True)\n"
        f"got = codes.gather(1, order)\nwant = got.cummax(1).values{tail}"
    )
