"""Changes with which a training is run again, to see whether its first bad value goes away: one at
a time, made by its environment or its arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from narrowfuzz_watch import REMOVE


@dataclass(frozen=True)
class Change:
    """A change of a run: environment variables, and arguments that follow the command's own."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


UNCHANGED = Change("unchanged")
#: The changes of ``--remove``, which the user need not specify.
REMOVALS = (
    Change("without torch.compile", {"TORCH_COMPILE_DISABLE": "1"}),
    Change("without activation checkpointing", {REMOVE: "checkpointing"}),
    Change(
        "with each of inductor's casts carried out", {"TORCHINDUCTOR_EMULATE_PRECISION_CASTS": "1"}
    ),
    Change(
        "with deterministic algorithms",
        {REMOVE: "nondeterminism", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    ),
)


def variant(text: str) -> Change:
    """The change of ``--variant``: NAME=VALUE sets an environment variable, anything else is
    arguments. Raises ValueError if it is neither."""
    if set_ := re.fullmatch(r"([A-Z_][A-Z0-9_]*)=(.*)", text, re.DOTALL):
        return Change(f"with {text}", {set_[1]: set_[2]})
    try:
        arguments = tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"--variant {text!r} cannot be split as a shell does: {error}") from error
    if not arguments:
        raise ValueError("--variant is empty: give arguments, or NAME=VALUE of the environment")
    return Change(f"with {text}", arguments=arguments)
