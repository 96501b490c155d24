"""Results computed from the inputs and results of an operator's call. This module does not import
torch, so operators can be described without it; scripts are pasted from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def parameter_again(
    tensors: Mapping[str, Any], results: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The parameter under a second name, which has a second bound."""
    return {"bounded_param": results["param"]}


def chosen_count(
    tensors: Mapping[str, Any], results: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """How many experts each token was sent to."""
    return {"count": results["chosen"].float().sum(-1)}


def rate_of_muon(options: Mapping[str, Any], rows: int, columns: int) -> float:
    """The factor by which Muon multiplies an update with this many rows and columns."""
    if options["adjust_lr_fn"] == "match_rms_adamw":
        return float(options["lr"] * 0.2 * math.sqrt(max(rows, columns)))
    return float(options["lr"] * math.sqrt(max(1.0, rows / columns)))


def singular_values_and_alignment(
    tensors: Mapping[str, Any], results: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The singular values, largest first, of Muon's update of the decayed parameter, divided by its
    rate; and the inner product of that update with the gradient that was orthogonalised, divided by
    the sum of this gradient's singular values. NaN if either is not finite."""
    options, param = settings["options"], tensors["param"].double().cpu()
    decayed = param * (1.0 - options["lr"] * options["weight_decay"])
    update = (decayed - results["param"].double().cpu()) / rate_of_muon(options, *param.shape)
    gradient = results["momentum_buffer"].double().cpu()
    if options["nesterov"]:
        gradient = gradient.lerp(tensors["grad"].double().cpu(), 1.0 - options["momentum"])
    if not (update.isfinite().all() and gradient.isfinite().all()):
        none = update.new_full((min(update.shape),), math.nan).float()
        return {"singular_values": none, "alignment": none[:1]}
    total = gradient.svd(compute_uv=False).S.sum()
    return {
        "singular_values": update.svd(compute_uv=False).S.float(),
        "alignment": ((gradient * update).sum() / total).reshape(1).float(),
    }


def at_their_places(
    tensors: Mapping[str, Any], results: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The values at the indices that a sort returned, and for each row the number of indices that
    occur twice or, if it is stable, that follow a larger index of an equal value."""
    dim, places = settings["dim"], results["indices"].long()
    found = tensors["input"].gather(dim, places)
    wrong = (places.sort(dim).values.diff(dim=dim) == 0).sum(dim, keepdim=True)
    if settings["stable"]:
        equal = found.diff(dim=dim) == 0
        wrong = wrong + (equal & (places.diff(dim=dim) < 0)).sum(dim, keepdim=True)
    return {"found": found, "misplaced": wrong.float()}
