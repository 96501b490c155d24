"""What a worker says of an error of ours: enough to find it, and not all that was drawn."""

from __future__ import annotations

import traceback

#: Calls that are shown, and characters of the message.
_FRAMES, _SAID = 12, 2000


def innermost(error: BaseException) -> str:
    """The traceback of the innermost of what was raised. Hypothesis puts it into a group, and adds
    notes that hold all it has drawn."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.format_tb(error.__traceback__)[-_FRAMES:]
    said = f"{type(error).__name__}: {str(error)[:_SAID]}"
    return f"Traceback (innermost {len(frames)} calls):\n{''.join(frames)}{said}"
