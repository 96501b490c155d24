"""``torch.amp.GradScaler``'s unscaling of gradients: they are multiplied in place by the inverse of
the scale, and a number records whether one of them is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from narrowfuzz.numerics.accumulator import U32, Unjudged
from narrowfuzz.numerics.formats import FORMATS
from narrowfuzz.operators.operator import TORCH_DTYPE, Expected, Operator, Read
from narrowfuzz.operators.sum import FLUSHED
from narrowfuzz.trace.trace import OperatorCall

#: Larger gradients take longer to judge than to unscale.
LARGEST_GRADIENT = 2**22


def _read(named: Mapping[str, Any], result: Any) -> list[Read]:
    scaled, given = named["self"], {n: named[n] for n in ("found_inf", "inv_scale")}
    if any(x.numel() > LARGEST_GRADIENT for x in scaled):
        raise Unjudged(f"a gradient of more than {LARGEST_GRADIENT} elements")
    finite = [bool(x.isfinite().all()) for x in scaled]
    found = {"found_inf": result["found_inf"]}
    return [
        Read(
            {"grad": x, **given},
            {"grad": after, **found},
            {"others_finite": all(finite[:i]) and all(finite[i + 1 :])},
        )
        for i, (x, after) in enumerate(zip(scaled, result["self"], strict=True))
    ]


def _expected(call: OperatorCall) -> dict[str, Expected]:
    """``grad``: the product, rounded to fp32 as IEEE 754 defines it, and then to the dtype. The
    first rounding is exact where fp32 holds the product, as with an inverse that is a power of two;
    a kernel may flush numbers below fp32's normal ones.
    ``found_inf``: 1 if an element is not finite, otherwise as it was before. Unknown if this tensor
    is finite and another tensor of its list is not."""
    grad, before = (call.tensors[n].astype(np.float64) for n in ("grad", "found_inf"))
    with np.errstate(all="ignore"):
        centre = grad * call.tensors["inv_scale"].astype(np.float64).reshape(())
        twice = np.isfinite(centre) & (centre.astype(np.float32) != centre)
        twice &= call.dtypes["grad"] != "fp32"
        radius = np.where(twice, U32 * np.abs(centre) + 2.0**-150, 0.0)
        tiny = (np.abs(centre) < FLUSHED) | (np.abs(grad) < FLUSHED)
        radius = np.where(tiny, radius + np.abs(centre), radius)
    finite = bool(np.isfinite(grad).all())
    found = before if finite else np.ones(before.shape)
    unknown = np.full(before.shape, finite and not call.settings["others_finite"])
    nowhere = np.zeros(grad.shape, dtype=bool)
    return {
        "grad": Expected.within(centre, radius, FORMATS[call.dtypes["grad"]], nowhere),
        "found_inf": Expected.between(found, found, unknown),
    }


def _title(call: OperatorCall) -> str:
    shape, dtype = list(call.tensors["grad"].shape), TORCH_DTYPE[call.dtypes["grad"]]
    inverse = float(call.tensors["inv_scale"].reshape(()))
    return f"GradScaler's unscaling of a {dtype} gradient of {shape} by {inverse:.9g}"


OPERATOR = Operator(
    name="unscale",
    words="gradients that are unscaled",
    kernels=("aten::_amp_foreach_non_finite_check_and_unscale_",),
    overwrites=("self", "found_inf"),
    read=_read,
    expected=_expected,
    expression="unscaled(grad, found_inf, inv_scale)",
    title=_title,
    results=("grad", "found_inf"),
    helper="unscaled",
)
