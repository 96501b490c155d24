"""narrowfuzz: find numerical bugs in FP8, MXFP8 and NVFP4 training before they spoil a long run.

Data flow: draw -> case -> arms -> trace -> rules -> verdict -> triage -> report.
``__all__`` is the public API: what a file of recipes or plants needs, and what tests of a user's
own model need.
Its names are imported on first access, so importing this package loads neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowfuzz_watch import watched as watch

    from narrowfuzz.arms.tensors import fp8_codes, fp32_array
    from narrowfuzz.campaign.testing import cases, check
    from narrowfuzz.case.spec import Case, DataSpec, Spec
    from narrowfuzz.numerics.formats import E2M1, E4M3FN, E5M2
    from narrowfuzz.numerics.plan import (
        HIGH_PRECISION,
        Fp32InverseScale,
        Fp32Scale,
        GemmPlan,
        MxScale,
        OperandPlan,
        Plan,
        TwoLevelScale,
    )
    from narrowfuzz.plants.plant import Plant
    from narrowfuzz.recipe.recipe import Emit, Recipe, every_linear, load_recipes
    from narrowfuzz.trace.trace import Seen

__version__ = "0.1.0"

_HOME = {
    "arms.tensors": ("fp8_codes", "fp32_array"),
    "case.spec": ("Case", "DataSpec", "Spec"),
    "numerics.formats": ("E2M1", "E4M3FN", "E5M2"),
    "numerics.plan": (
        "HIGH_PRECISION",
        "Fp32InverseScale",
        "Fp32Scale",
        "GemmPlan",
        "MxScale",
        "OperandPlan",
        "Plan",
        "TwoLevelScale",
    ),
    "plants.plant": ("Plant",),
    "recipe.recipe": ("Emit", "Recipe", "every_linear", "load_recipes"),
    "campaign.testing": ("cases", "check"),
    "trace.trace": ("Seen",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "E2M1",
    "E4M3FN",
    "E5M2",
    "HIGH_PRECISION",
    "Case",
    "DataSpec",
    "Emit",
    "Fp32InverseScale",
    "Fp32Scale",
    "GemmPlan",
    "MxScale",
    "OperandPlan",
    "Plan",
    "Plant",
    "Recipe",
    "Seen",
    "Spec",
    "TwoLevelScale",
    "__version__",
    "cases",
    "check",
    "every_linear",
    "fp8_codes",
    "fp32_array",
    "load_recipes",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name == "watch":  # a module that can be called
        return importlib.import_module("narrowfuzz_watch")
    module = _MODULE_OF.get(name) or _deprecated(name)
    return getattr(importlib.import_module(f"narrowfuzz.{module}"), name)


def _deprecated(name: str) -> str:
    """The module of a deprecated name, after a warning. Raises AttributeError for other names."""
    old = importlib.import_module("narrowfuzz.recipe.deprecated")
    if name not in old.NAMES:
        raise AttributeError(f"module 'narrowfuzz' has no attribute {name!r}")
    module, instead = old.NAMES[name]
    old.warn(f"narrowfuzz.{name}", instead, stacklevel=3)
    return str(module)
