"""Script text of the relations of shape, state and recipe: R5-R11 and R16-R22."""

from __future__ import annotations

import numpy as np

from narrowfuzz.case import Case, Spec
from narrowfuzz.expect import Is, Within
from narrowfuzz.numerics.formats import F32
from narrowfuzz.numerics.plan import Plan, Role
from narrowfuzz.oracles.relations_recipe import COPIES
from narrowfuzz.oracles.relations_shape import AXES, halves, variants
from narrowfuzz.oracles.variant import OPERAND_AXES, RESULT_AXES, Index, Variant
from narrowfuzz.recipe import ScriptText
from narrowfuzz.triage.script_checks import check_element
from narrowfuzz.triage.script_parts import SITE, SLOT, equal_check, layouts
from narrowfuzz.verdict import Verdict

#: Relations that may point at an operand or at a result.
VARIANTS = ("R5", "R6", "R7", "R8", "R9", "R11", "R16", "R17", "R18", "R20")
#: Relations whose scripts need a ``run`` for tensors of any shape.
RERUN = (*VARIANTS, "R10", "R19")


def rerun_function(spec: Spec, text: ScriptText, relation: str) -> str:
    """build and step, and run for tensors of any shape; ``plain`` leaves them contiguous."""
    stateful = relation in ("R18", "R20")
    lead = spec.input_shape[:-1]
    odd = layouts(spec)
    if odd and not stateful:
        odd = "    if not plain:\n" + "".join(f"    {line}\n" for line in odd.splitlines())
    run = """
def run(input, weight, grad_output, *bias, **how):
    return step(build(weight, *bias), input, grad_output, **how)"""
    body = f"""
def build(weight, bias={"bias" if spec.bias else None}):
    model = torch.nn.Sequential(collections.OrderedDict(
        proj=torch.nn.Linear(*weight.t().shape, bias is not None, dtype=dtype)))
    model = {text.convert}
    with torch.no_grad():
        model.proj.weight.copy_(weight)
        if bias is not None: model.proj.bias.copy_(bias.reshape(-1))
    return model
def step(model, input, grad_output, lead={lead}, plain=False):
    x, g = (t.reshape(*lead, t.shape[1]) for t in (input, grad_output))
{odd}    x = x.detach().requires_grad_(True)
    y = model(x)
    y.backward(g)
    w = getattr(model.proj.weight.grad, "_data", model.proj.weight.grad)
    return dict(output=y.detach().reshape(grad_output.shape), grad_weight=w if w is None else
                w.clone(), grad_input=x.grad.reshape(input.shape))  # a later step may add to w"""
    return (body + ("" if stateful else run)).strip("\n")


def check_relation(case: Case, verdict: Verdict, plan: Plan, tensors: dict[str, F32]) -> str:
    """Both runs and their comparison; "" for a relation of values."""
    name, role = verdict.oracle, verdict.role
    if name == "R10":
        return _check_sum(verdict, halves(case.spec, plan, tensors))
    if name == "R19":
        without = f'run(input, weight, grad_output, None)["{role}"]'
        added = " + bias" if role == "output" else ""
        got = f'got = run(input, weight, grad_output)["{role}"]'
        return f"{got}\nwant = {without}{added}{equal_check(f'R19 {role}')}"
    if name in ("R18", "R20"):
        return _check_state(verdict, plan)
    if name in VARIANTS:
        found = variants(name, case, plan, tensors)
        named = [t for t in found if t.title.strip() == verdict.at.run]
        if not named:
            raise ValueError(f"{name} says nothing about this case")
        return _check_variant(verdict, named[0], plan)
    if name == "R21":
        return _check_value(verdict, plan)
    return _check_copies(verdict, plan) if name == "R22" else ""


def _text(index: Index) -> str:
    """A Python expression for an index."""
    ints = [int(i) for i in index]
    if ints and ints == list(range(ints[0], ints[-1] + 1)):
        return f"list(range({ints[0]}, {ints[-1] + 1}))"
    return str(ints)


def _run_of(variant: Variant) -> str:
    """The call that runs a variant."""
    if variant.swapped:
        swapped = "weight, input, grad_output.t().contiguous(), None"
        return f"run({swapped}, lead=({variant.spec.m},), plain=True)"
    arguments = []
    for name, (rows, cols) in AXES.items():
        more = np.subtract(
            variant.tensors[name].shape, [len(variant.index[a]) for a in (rows, cols)]
        )
        taken = f"{name}[{rows}][:, {cols}]"
        padded = f"torch.nn.functional.pad({taken}, (0, {more[1]}, 0, {more[0]}))"
        arguments.append(padded if more.any() else taken)
    if "bias" in variant.tensors:
        arguments.append("bias[:, n]")
    arguments.append(f"lead={variant.spec.input_shape[:-1]}")
    if (variant.spec.input_layout, variant.spec.grad_layout) == ("contiguous", "contiguous"):
        arguments.append("plain=True")
    return f"run({', '.join(arguments)})"


def _check_variant(verdict: Verdict, variant: Variant, plan: Plan) -> str:
    role: Role = verdict.role  # type: ignore[assignment]
    there, side = variant.operand(role, verdict.at.side or "a")
    lists = f"m, k, n = {', '.join(_text(variant.index[dim]) for dim in 'mkn')}\n"
    if verdict.at.side:
        at, axes = verdict.at.index, OPERAND_AXES[role, verdict.at.side]
        source = tuple(int(variant.index[dim][i]) for dim, i in zip(axes, at, strict=True))
        want = _element(verdict, role, verdict.at.side, plan, source)
        return (
            f"{lists}run(input, weight, grad_output)\nwant = {want}\nseen.clear()\n"
            f"{_run_of(variant)}\ngot = {_element(verdict, there, side, plan, at)}\n"
            f"{_same_number(verdict)}"
        )
    rows, cols = RESULT_AXES[role]
    turned = ".t()" if variant.swapped and role == "output" else ""
    if isinstance(verdict.expect, Within):
        place = [
            int(np.flatnonzero(variant.index[dim] == i)[0])
            for dim, i in zip((rows, cols), verdict.at.index, strict=True)
        ]
        return lists + check_element(
            verdict, f'{_run_of(variant)}["{there}"]{turned}{place}.item()'
        )
    return (
        f'{lists}want = run(input, weight, grad_output)["{role}"][{rows}][:, {cols}]\n'
        f'got = {_run_of(variant)}["{there}"]{turned}[:len({rows}), :len({cols})]'
        f"{equal_check(f'{verdict.oracle} {role}')}"
    )


def _scale(role: Role, side: str, plan: Plan, at: tuple[int, ...]) -> str:
    """The scale of element ``at``: a number s that multiplies data, or an E8M0 byte."""
    operand = plan.gemms[role].a if side == "a" else plan.gemms[role].b
    text = f"seen[{SITE[role]}][{SLOT[side] + 1}]"
    if operand.granularity == "block":
        return f"{text}.view(torch.uint8)[{at[0]}, {at[1] // operand.block}].item()"
    return f"{text}[{at[0]}, 0].item()" if operand.granularity == "row" else f"{text}.item()"


def _code(role: Role, side: str, at: tuple[int, ...]) -> str:
    return f"seen[{SITE[role]}][{SLOT[side]}].float(){list(at)}.item()"


def _element(verdict: Verdict, role: Role, side: str, plan: Plan, at: tuple[int, ...]) -> str:
    """The code of element ``at``, or its scale where that is what differs."""
    if verdict.at.what == "scale":
        return _scale(role, side, plan, at)
    return _code(role, side, at)


def _same_number(verdict: Verdict) -> str:
    return (
        f'print("{verdict.at}:", got, "must be", want)\n'
        "sys.exit(0 if got == want or (got != got and want != want) else 1)"
    )


def _check_sum(verdict: Verdict, parts: tuple[Variant, ...]) -> str:
    if not parts:
        raise ValueError("R10 says nothing about this case")
    runs = []
    for part in parts:
        rows, bias = part.index["m"], ", bias" if "bias" in part.tensors else ""
        cut = f"[{rows[0]}:{rows[-1] + 1}]"
        call = f"run(input{cut}, weight, grad_output{cut}{bias}, lead=({len(rows)},), plain=True)"
        runs.append(f'{call}["grad_weight"].double()')
    total = " + ".join(runs)
    return f"total = {total}\n" + check_element(verdict, f"total{list(verdict.at.index)}.item()")


def _check_state(verdict: Verdict, plan: Plan) -> str:
    """R18: steps with lr = 0; R20: save, build, load."""
    first = "model = build(weight)\nwant = step(model, input, grad_output)"
    if verdict.oracle == "R18":
        after = (
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.0)\n"
            "for to_none in (True, False):\n"
            "    optimizer.step()\n    optimizer.zero_grad(set_to_none=to_none)\n"
            "    seen = []\n    got = step(model, input, grad_output)"
        )
    else:
        trusted = verdict.role != "state"
        after = (
            "torch.save(model.state_dict(), file := io.BytesIO())\nfile.seek(0)\n"
            "fresh = build(torch.zeros_like(weight))\n"
            f"fresh.load_state_dict(torch.load(file, weights_only={not trusted}))\n"
            "seen = []\ngot = step(fresh, input, grad_output)"
        )
    if verdict.role == "state":
        indented = "\n".join(f"    {line}" for line in after.splitlines())
        return (
            f"{first}\ntry:\n{indented}\nexcept Exception as error:\n"
            "    print(type(error).__name__, str(error).strip().splitlines()[0])\n"
            '    sys.exit(1)\nprint("runs again")'
        )
    role: Role = verdict.role  # type: ignore[assignment]
    if verdict.at.side:
        seen = _element(verdict, role, verdict.at.side, plan, verdict.at.index)
        return f"{first}\nwant = {seen}\n{after}\ngot = {seen}\n{_same_number(verdict)}"
    return f'{first}\n{after}\ngot, want = got["{role}"], want["{role}"]' + equal_check(
        f"{verdict.oracle} {role}"
    )


def _value(role: Role, side: str, plan: Plan, at: tuple[int, ...]) -> str:
    """The dequantised element ``at`` of an operand, from its code and its scale."""
    block = (plan.gemms[role].a if side == "a" else plan.gemms[role].b).block
    scale = _scale(role, side, plan, at)
    return f"{_code(role, side, at)} {f'* 2.0 ** ({scale} - 127)' if block else f'/ {scale}'}"


def _check_value(verdict: Verdict, plan: Plan) -> str:
    """R21: the value against the other recipe's, which the verdict names."""
    assert isinstance(verdict.expect, Is)
    role: Role = verdict.role  # type: ignore[assignment]
    return (
        "run(input, weight, grad_output)\n"
        f"got = {_value(role, verdict.at.side, plan, verdict.at.index)}\n"
        f'want = float.fromhex("{verdict.expect.value}")\n'
        f"{_same_number(verdict)}"
    )


def _check_copies(verdict: Verdict, plan: Plan) -> str:
    """R22: one element of the column copy against the row copy's."""
    role: Role = verdict.role  # type: ignore[assignment]
    row, column = next(p for p in COPIES.values() if p[1] == (role, verdict.at.side))
    at, turned = verdict.at.index, (verdict.at.index[1], verdict.at.index[0])
    if verdict.at.what == "values":
        want, got = _value(*row, plan, turned), _value(*column, plan, at)
    else:
        want, got = (
            f"math.frexp({_code(role_, side, i)})[0]"
            for (role_, side), i in ((row, turned), (column, at))
        )
    return f"run(input, weight, grad_output)\nwant = {want}\ngot = {got}\n{_same_number(verdict)}"
