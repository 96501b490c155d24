"""Assigns the recorded GEMMs of a single linear to its three roles."""

from __future__ import annotations

from narrowfuzz.case.arm import Arm
from narrowfuzz.case.spec import Spec
from narrowfuzz.numerics.plan import Plan, Role
from narrowfuzz.trace.trace import Phase, Seen, Site, SiteTrace


def expected_sites(spec: Spec, arm: Arm, plan: Plan) -> tuple[tuple[Role, Phase], ...]:
    """The GEMMs that must be recorded for one forward and backward of a linear, in order; where it
    does not train, only the forward's.

    An eager recipe's tap records the quantised ones only; in compiled code every multiply is
    recorded.
    """
    recompute: tuple[tuple[Role, Phase], ...] = (("output", "recompute"),) if arm.checkpoint else ()
    every: tuple[tuple[Role, Phase], ...] = (
        ("output", "forward"),
        *recompute,
        ("grad_input", "backward"),
        ("grad_weight", "backward"),
    )
    ran = every if spec.trains else every[:1]
    return tuple(site for site in ran if arm.compiler or plan.gemms[site[0]].quantised)


def name_sites(
    records: list[tuple[Seen, Seen]], forward_count: int, spec: Spec, arm: Arm, plan: Plan
) -> tuple[tuple[SiteTrace, ...], str]:
    """The sites of the recorded GEMMs, or no sites and the reason why they cannot be assigned.

    Eager runs them in the order of the recipe's code. A compiled backward may reorder them, so
    there the two gradients are distinguished by which is in codes if only one is quantised, else
    by shape, and not at all where the shapes coincide. A high-precision GEMM gets no site: its
    operands are the layer's own tensors, which the rules have.
    """
    expected = expected_sites(spec, arm, plan)
    keeps_products = arm.compiler or arm.checkpoint == "selective"
    if keeps_products and len(records) == len(expected) - 1:
        expected = tuple(site for site in expected if site[1] != "recompute")
    in_forward = sum(phase == "forward" for _, phase in expected)
    if len(records) != len(expected) or forward_count != in_forward:
        return (), (
            f"expected {len(expected)} GEMMs, {in_forward} of them in forward; saw {len(records)}"
        )
    if arm.compiler and spec.trains:
        backward = _grad_input_first(records[1], records[2], spec, plan)
        if backward is None:
            return (), "the two backward GEMMs have the same shape and may be reordered"
        records = [records[0], *backward]
    sites = tuple(
        SiteTrace(Site("proj", role, phase), a, b)
        for (role, phase), (a, b) in zip(expected, records, strict=True)
        if plan.gemms[role].quantised
    )
    return sites, ""


def _grad_input_first(
    one: tuple[Seen, Seen], other: tuple[Seen, Seen], spec: Spec, plan: Plan
) -> tuple[tuple[Seen, Seen], tuple[Seen, Seen]] | None:
    """The two backward GEMMs in the order grad_input, grad_weight; None where either could be
    either."""
    in_codes = tuple(record[0].codes is not None for record in (one, other))
    if in_codes[0] != in_codes[1]:
        one_is_first = in_codes[0] == plan.gemms["grad_input"].quantised
    elif spec.tokens == spec.n:
        return None
    else:
        one_is_first = _rows(one[0]) == spec.tokens
    return (one, other) if one_is_first else (other, one)


def _rows(seen: Seen) -> int:
    array = seen.codes if seen.codes is not None else seen.values
    assert array is not None
    return int(array.shape[0])
