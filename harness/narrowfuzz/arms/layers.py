"""The recorded calls of a model's linears as plain data, with their GEMMs assigned to roles."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from narrowfuzz.arms.recordings import seen_of
from narrowfuzz.arms.tensors import DTYPE_NAME, fp32_array
from narrowfuzz.case.spec import TensorName
from narrowfuzz.numerics.formats import F32
from narrowfuzz.numerics.plan import Plan, Role
from narrowfuzz.play.layers import Call
from narrowfuzz.recipe.recipe import ROUNDED
from narrowfuzz.trace.trace import LayerCall, Site, SiteTrace


def layers_of(model: nn.Module, names: tuple[str, ...], focus: int | None) -> dict[str, nn.Module]:
    """The named linears, by name; with a ``focus`` only one, number ``focus`` in alphabetical order
    (counted around)."""
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = {n: modules[n] for n in names if n in modules}
    if focus is not None and layers:
        name = sorted(layers)[focus % len(layers)]
        layers = {name: layers[name]}
    return layers


def calls_of(
    calls: Iterable[Call],
    plan: Plan,
    shared: frozenset[str],
    rounds: frozenset[TensorName],
    *,
    inverse: bool,
) -> tuple[LayerCall, ...]:
    """The recorded calls of linears as plain data. Calls that did not finish are left out.

    Parameters and inputs in ``shared`` get gradients from elsewhere, too, so theirs are dropped,
    and so are calls in a dtype that no recipe knows, such as fp64.
    ``rounds`` are the tensors that a layer rounds under autocast; ``inverse``: recorded scales are
    1 / scale.
    """
    closed = []
    for call in calls:
        for role in ("input", "weight", "bias"):
            if f"{call.module}.{role}" in shared:
                call.outputs.pop(f"grad_{role}", None)
        output = call.outputs.get("output")
        if output is not None and output.dtype in DTYPE_NAME and call.weight is not None:
            closed.append(_close(call, plan, rounds, inverse))
    return tuple(closed)


def _close(call: Call, plan: Plan, rounds: frozenset[TensorName], inverse: bool) -> LayerCall:
    tensors = dict(call.tensors)
    if call.weight.dtype in DTYPE_NAME:  # else FSDP has gathered its codes
        tensors["weight"] = call.weight
    if call.bias is not None:
        tensors["bias"] = call.bias
    kind = call.outputs["output"].dtype
    if all(t.dtype == kind for name, t in tensors.items() if name in ("input", "weight")):
        rounds = ROUNDED  # there is nothing to round: it did not run under autocast
    sites, unobserved = _sites(call, plan, inverse)
    return LayerCall(
        call.module,
        call.index,
        call.phase,  # type: ignore[arg-type]
        DTYPE_NAME[kind],
        {name: _rows(t, name) for name, t in tensors.items()},
        {name: _rows(t, name) for name, t in call.outputs.items()},
        sites,
        unobserved,
        call.tensors["input"].shape[0] if call.tensors["input"].dim() == 3 else 0,
        rounds,
        call.forward,
        call.segment,
        call.checkpointed,
        frozenset({"weight", "bias"} & tensors.keys()) - call.trained,
    )


def _sites(call: Call, plan: Plan, inverse: bool) -> tuple[tuple[SiteTrace, ...], str]:
    """The call's GEMMs with their roles (one in forward; in backward those that the plan
    quantises), or why they cannot be assigned."""
    gradients: tuple[Role, ...] = ("grad_input", "grad_weight")
    expected = [role for role in gradients if plan.gemms[role].a.format is not None]
    if not plan.quantised:
        return (), ""
    seen, backward = len(call.forward_gemms), len(call.backward_gemms)
    wanted = len(expected) if "grad_output" in call.tensors else 0
    if seen != 1 or backward != wanted:
        return (), f"expected 1 and {wanted} GEMMs, saw {seen} and {backward}"
    named = [("output", call.phase, call.forward_gemms[0])]
    named += [
        (role, "backward", gemm) for role, gemm in zip(expected, call.backward_gemms, strict=False)
    ]
    return tuple(
        SiteTrace(Site(call.module, role, phase), *seen_of(gemm, inverse=inverse))  # type: ignore[arg-type]
        for role, phase, gemm in named
    ), ""


def _rows(t: torch.Tensor, name: str) -> F32:
    """[..., C] as float32 [rows, C]; a bias and its gradient stay 1-D."""
    inner: Any = getattr(t, "_data", t)
    if name in ("bias", "grad_bias"):
        return fp32_array(inner).copy()
    return fp32_array(inner.reshape(math.prod(inner.shape[:-1]), inner.shape[-1])).copy()


def is_linear(module: nn.Module) -> bool:
    """True unless a user gave this linear a forward or a class of its own: it need not compute a
    linear then."""
    # scaled_linear takes the place of a library's linear for recipes without a library
    libraries = ("torch.", "torchao.", "torchtitan.", "narrowfuzz.arms.scaled_linear")
    user_made = not type(module).__module__.startswith(libraries)
    return not user_made and "forward" not in vars(module) and hasattr(module, "weight")
