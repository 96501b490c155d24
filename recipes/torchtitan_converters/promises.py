"""The layers that torchtitan's converters promise to take, and where each of their releases
runs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

from narrowfuzz.arms.model_names import parameter_shapes
from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.recipe.recipe import named
from packaging.version import Version

#: The largest tile that the kernel may be tuned to, which Triton's interpreter runs.
TILE = 128


def refusal(
    spec: Spec, device: str, *, filters: tuple[str, ...] | None, only: tuple[str, ...] = ()
) -> str:
    """Why the casts of some layer refuse, "" if none does: the kernel needs whole tiles."""
    multiple = TILE if spec.backend == "interpreted" else 32
    for name, (out, features) in linears(spec).items():
        if not _promised(name, out, features, filters=filters, only=only):
            continue
        sizes = {"tokens": spec.tokens, "in_features": features, "out_features": out}
        for what, size in sizes.items():
            if size % multiple:
                layer = name.removeprefix("model.")
                return (
                    f"{what} of {layer} must be a multiple of {multiple}, got {size} (its "
                    f"weight is {out} x {features}, and there are {spec.tokens} tokens)"
                )
    return ""


def linears(spec: Spec) -> dict[str, tuple[int, int]]:
    """Name and weight shape of every linear of the Spec's model."""
    if spec.model not in MODELS:
        return {}
    shapes = parameter_shapes(spec)
    found = {n.removesuffix(".weight"): s for n, s in shapes.items() if n.endswith(".weight")}
    return {n: (s[0], s[1]) for n, s in found.items() if len(s) == 2 and "embedding" not in n}


def _promised(
    name: str,
    out: int,
    features: int,
    *,
    filters: tuple[str, ...] | None,
    only: tuple[str, ...],
) -> bool:
    left_out = ("output",) if filters is None else filters
    aligned = out % 16 == 0 and features % 16 == 0
    return aligned and not any(text in name for text in left_out) and named(name, only)


def unavailable(backend: str, device: str) -> str:
    if device != "cpu":
        return "it is emulated for CPUs: on a GPU torchao's own recipes run the same kernels"
    if backend != "interpreted":
        return ""
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, for its interpreter: --with torchtitan==0.1.0 brings it"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "TRITON_INTERPRET=1 must be set before torch is imported: --with torchtitan sets it"
    return ""


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def release(package: str) -> tuple[int, ...]:
    """The first two numbers of its version, zeros if it is not installed."""
    return Version(version(package) or "0.0").release[:2]


def old() -> bool:
    """Is this torchtitan 0.1, whose converter knows another torchao than 0.2's?"""
    return release("torchtitan") == (0, 1)


def configured() -> bool:
    """Do the converters of this torchtitan change configurations, not models?"""
    return release("torchtitan") >= (0, 3)


def unavailable_mx(backend: str, device: str) -> str:
    """Each torchtitan builds the MXFP8 configuration of one torchao."""
    wanted, here = "0.11" if old() else "0.15", version("torchao")
    if not here.startswith(f"{wanted}."):
        return f"its MXFP8 is torchao {wanted}'s, and {here or 'none'} is installed"
    if backend == "interpreted" and not old():
        return "torchtitan 0.2 sets its choice of cast in a field that torchao 0.15 does not read"
    return unavailable(backend, device)
