"""Our own delayed scaling: correct under every schedule it accepts, and host of planted faults."""

from __future__ import annotations

from narrowfuzz.recipe.delayed_subject import carries, subject
from narrowfuzz.recipe.recipe import Recipe

RECIPES = [
    Recipe(
        name="reference.delayed",
        family="reference.delayed",
        title="a linear with delayed scaling, ours",
        subject=subject,
        carries=carries,
        dtypes=("bf16", "fp32"),
    )
]
