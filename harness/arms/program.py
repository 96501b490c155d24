"""Build one program for (Spec, arm) and run it on any number of data draws.

The program is built, converted and compiled once; every draw overwrites its parameters in place.
Exceptions of the library under test become the Trace's error; exceptions of ours are not caught.
"""

from __future__ import annotations

import traceback as tb
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.arms.ladder import Arm
from harness.arms.taps import CompiledTap, name_sites, tapped_backend
from harness.arms.tensors import (
    TORCH_DTYPE,
    as_rows,
    fp32_array,
    grad_tensor,
    input_tensor,
    to_torch,
)
from harness.case import Spec
from harness.numerics.formats import F32
from harness.recipe import Recipe
from harness.trace import ErrorPhase, RunError, Seen, SiteTrace, Trace

#: Compiled graphs one step must call: forward and backward.
_ARTEFACTS = 2


class LinearModel(nn.Module):
    """One linear inside a container, so that the layer has a name."""

    def __init__(self, spec: Spec, device: str) -> None:
        super().__init__()
        self.proj = nn.Linear(
            spec.k, spec.n, spec.bias, device=device, dtype=TORCH_DTYPE[spec.dtype]
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.proj(input)  # type: ignore[no-any-return]


class Program:
    """A built, converted and (where the arm says so) compiled model."""

    def __init__(self, spec: Spec, recipe: Recipe, arm: Arm, *, device: str = "cpu") -> None:
        self.spec, self.recipe, self.arm, self.device = spec, recipe, arm, device
        self.error: RunError | None = None
        self._compiled_tap = CompiledTap()
        try:
            with torch.no_grad():
                self._model = recipe.convert(LinearModel(spec, device), spec)
            self._call = self._callable()
        except Exception as error:
            self.error = run_error(error, "convert")

    def _callable(self) -> Callable[[torch.Tensor], torch.Tensor]:
        model = self._model
        if self.arm.compiler:
            compiled = torch.compile(
                model,
                backend=tapped_backend(self.arm.compiler, self._compiled_tap),
                dynamic=False,
                options=dict(self.arm.options) or None,
            )
            return compiled  # type: ignore[no-any-return]
        if self.arm.checkpoint:
            reentrant = self.arm.checkpoint == "reentrant"
            return lambda x: checkpoint(model, x, use_reentrant=reentrant)  # type: ignore[no-any-return]
        return model  # type: ignore[no-any-return]

    def run(self, tensors: dict[str, F32], *, tap: bool) -> Trace:
        """One forward and backward; with ``tap``, the operands of every GEMM are recorded."""
        if self.error is not None:
            return Trace(self.arm.name, error=self.error)
        self._load(tensors)
        x = input_tensor(tensors["input"], self.spec, self.device)
        g = grad_tensor(tensors["grad_output"], self.spec, self.device)
        seen: list[tuple[Seen, Seen]] = []
        forward_count = 0

        def emit(a: Seen, b: Seen) -> None:
            seen.append((a, b))

        watching = tap and not self.arm.compiler
        phase: ErrorPhase = "forward"
        try:
            with self.recipe.tap(emit) if watching else self._compiled_tap.recording(tap):
                output = self._call(x)
                forward_count = len(seen) if watching else self._compiled_tap.mark()
                phase = "backward"
                output.backward(g)
        except Exception as error:
            failed = run_error(error, phase)
            if self.arm.compiler:
                self.error = failed  # a compiler that failed once fails as slowly every time
            return Trace(self.arm.name, error=failed)
        if self.arm.compiler and self._compiled_tap.calls < _ARTEFACTS:
            # Dynamo falls back to eager without a word; such a run would pass every comparison
            calls = self._compiled_tap.calls
            return Trace(self.arm.name, void=f"{calls} of {_ARTEFACTS} compiled graphs ran")
        sites: tuple[SiteTrace, ...] = ()
        unobserved = ""
        plan = self.recipe.plan(self.spec)
        if tap and plan.quantised:
            records = seen if watching else self._compiled_tap.records
            sites, unobserved = name_sites(records, forward_count, self.spec, self.arm, plan)
        return Trace(self.arm.name, self._outputs(output, x), sites, None, unobserved)

    def _load(self, tensors: dict[str, F32]) -> None:
        linear = self._model.proj
        with torch.no_grad():
            for name, parameter in (("weight", linear.weight), ("bias", linear.bias)):
                if parameter is not None:
                    parameter.copy_(to_torch(tensors[name], self.spec.dtype, self.device))
                    parameter.grad = None

    def _outputs(self, output: torch.Tensor, x: torch.Tensor) -> dict[str, F32]:
        spec, linear = self.spec, self._model.proj
        named: dict[str, F32] = {"output": as_rows(output, spec, spec.n)}
        if x.grad is not None:
            named["grad_input"] = as_rows(x.grad, spec, spec.k)
        for name, parameter in (("grad_weight", linear.weight), ("grad_bias", linear.bias)):
            if parameter is not None and parameter.grad is not None:
                grad: Any = parameter.grad
                named[name] = fp32_array(getattr(grad, "_data", grad))
        return named


def run_error(error: BaseException, phase: ErrorPhase) -> RunError:
    """What a library raised, with the innermost of *its* functions."""
    frames = tb.extract_tb(error.__traceback__)
    where = "?"
    for frame in frames:
        parts = frame.filename.replace("\\", "/").split("/")
        if "site-packages" in parts:
            inside = parts[parts.index("site-packages") + 1 :]
            where = f"{'.'.join(inside).removesuffix('.py')}.{frame.name}"
    return RunError(
        phase=phase,
        type=type(error).__name__,
        message=str(error)[:4000],
        where=where,
        traceback="".join(tb.format_exception(error))[-8000:],
    )
