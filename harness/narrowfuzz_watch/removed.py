"""Disables parts of torch in a watched process for which torch has no environment variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint


def remove(what: str) -> None:
    """Disable a part; to be called right after torch was imported, before other modules have
    imported names from it. Raises ValueError for an unknown part."""
    if what == "checkpointing":
        torch.utils.checkpoint.checkpoint = _call
    elif what == "nondeterminism":
        torch.use_deterministic_algorithms(True, warn_only=True)
    else:
        raise ValueError(f"there is no {what!r} to remove: checkpointing or nondeterminism")


def _call(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Any = None,
    determinism_check: str = "",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Replaces torch.utils.checkpoint.checkpoint: nothing is recomputed."""
    return function(*args, **kwargs)
