"""Script text of the relations of values: R1-R4 and R12-R15."""

from __future__ import annotations

from narrowfuzz.case import Case
from narrowfuzz.numerics.formats import F32
from narrowfuzz.numerics.plan import OperandPlan
from narrowfuzz.numerics.reference import canonical_operands
from narrowfuzz.oracles.relations_values import (
    SCALED_BY,
    SCALES,
    move_below_amax,
    replace_row,
    scaling_exponent,
)
from narrowfuzz.recipe import Recipe
from narrowfuzz.triage.script_parts import SITE, SLOT, equal_check, hex_rows
from narrowfuzz.verdict import Verdict


def check_values(case: Case, verdict: Verdict, recipe: Recipe, tensors: dict[str, F32]) -> str:
    """The transformed run and what it must be."""
    name, role, seed = verdict.oracle, verdict.role, case.data.choice
    base = "base = run(input, weight, grad_output)\n"
    tail = equal_check(f"{name} {role}")
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
    a, _ = canonical_operands("output", tensors)
    plan = recipe.plan(case.spec).gemms["output"].a
    if name in ("R14", "R15"):
        moved = (
            move_below_amax(a, plan, seed)
            if name == "R14"
            else replace_row(a, seed, case.spec.dtype)
        )
        assert moved is not None
        rows = hex_rows(moved, case.spec.dtype)
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
        gemm = recipe.plan(case.spec).gemms[verdict.role]  # type: ignore[index]
        return _check_monotone(verdict, gemm.a if verdict.at.side == "a" else gemm.b, tail)
    raise ValueError(f"no stand-alone script for {name}")


def _check_monotone(verdict: Verdict, plan: OperandPlan, tail: str) -> str:
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
    slot = SLOT[verdict.at.side]
    return (
        f"run(input, weight, grad_output)\nx = {tensors[verdict.role, verdict.at.side]}\n"
        f"codes = seen[{SITE[verdict.role]}][{slot}].float().{granules}\n"
        f"order = x.{granules}.float().argsort(1, stable=True)\n"
        f"got = codes.gather(1, order)\nwant = got.cummax(1).values{tail}"
    )
