"""What a worker prints of an error in narrowfuzz itself: enough to locate it, not all draws."""

from __future__ import annotations

import traceback

from narrowfuzz.arms.census import RecipeError

#: Number of calls, and of characters of the message, that are shown.
_FRAMES, _SAID = 12, 2000


def innermost(error: BaseException) -> str:
    """The traceback of the innermost exception. Hypothesis puts it into a group, and adds notes
    with everything that it has drawn."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, RecipeError):  # it names the line
        return f"narrowfuzz: {error}"
    frames = traceback.format_tb(error.__traceback__)[-_FRAMES:]
    message = f"{type(error).__name__}: {str(error)[:_SAID]}"
    return f"Traceback (innermost {len(frames)} calls):\n{''.join(frames)}{message}"
