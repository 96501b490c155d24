"""Build one program for (Spec, arm) and run it on any number of data draws.

The program is built, converted and compiled once; every draw overwrites its parameters in place.
Exceptions of the library under test become the Trace's error; exceptions of ours are not caught.
"""

from __future__ import annotations

import copy
import traceback as tb
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from narrowfuzz.arm import Arm
from narrowfuzz.arms.census import convert
from narrowfuzz.arms.frames import in_libraries, module_of
from narrowfuzz.arms.ladder import options_on
from narrowfuzz.arms.layers import calls_of, watch_layers
from narrowfuzz.arms.lost import out_of_memory, raise_if_lost
from narrowfuzz.arms.sites import name_sites
from narrowfuzz.arms.taps import CompiledTap, attention_of, multiplied_of, seen_of, tapped_backend
from narrowfuzz.arms.tensors import (
    TORCH_DTYPE,
    as_rows,
    fp32_array,
    grad_tensor,
    ids_tensor,
    input_tensor,
    to_torch,
)
from narrowfuzz.arms.transfer import on_host
from narrowfuzz.case import LEARNING_RATE, Spec
from narrowfuzz.machine import lacking_kernel, onednn_stays
from narrowfuzz.models.zoo import MODELS, linear_names, tied_names
from narrowfuzz.numerics.formats import F32
from narrowfuzz.play.checkpoint import HOW, recomputing
from narrowfuzz.play.kernels import without_onednn
from narrowfuzz.play.layers import Call, LayerWatch
from narrowfuzz.play.taps import Attended, AttentionWatch, Product
from narrowfuzz.recipe import ROUNDED, Emit, Recipe
from narrowfuzz.trace import ErrorPhase, RunError, Trace

Model = Callable[[torch.Tensor], torch.Tensor]
#: How a single linear's parameters are called in a case's tensors.
_LINEAR = {"proj.weight": "weight", "proj.bias": "bias"}


class Program:
    """A built, converted and (where the arm says so) compiled model."""

    def __init__(self, spec: Spec, recipe: Recipe, arm: Arm, *, device: str = "cpu") -> None:
        self.spec, self.recipe, self.arm, self.device = spec, recipe, arm, device
        self.description = MODELS[spec.model]
        self.error: RunError | None = None
        self._tap = CompiledTap()
        #: The first run of a compiled program is what compiles it.
        self.ran = False
        try:
            with torch.no_grad():
                self._model = self._build()
            self._call = self._callable()
        except Exception as error:
            raise_if_lost(error, self.device)
            self.error = run_error(error, "convert")

    def _build(self) -> Any:
        spec = self.spec
        dtype = TORCH_DTYPE[spec.dtype]
        plain = self.description.build(spec, dtype=dtype, device=self.device)
        self._linears = linear_names(plain)
        self._shared = tied_names(plain)
        model, self._census = convert(self.recipe, plain, spec)
        if spec.lifecycle == "deepcopy":
            return copy.deepcopy(model)
        if spec.lifecycle == "reload":
            fresh = self.description.build(spec, dtype=dtype, device=self.device)
            fresh = self.recipe.convert(fresh, spec)
            fresh.load_state_dict(model.state_dict())
            return fresh
        return model

    def _callable(self) -> Model:
        call: Model = self._model
        if self.arm.checkpoint:
            how = HOW[self.arm.checkpoint]
            call = recomputing(self._model, how, self.description.regions)
        if not self.arm.compiler:
            return call
        options = options_on(self.arm, self.device)
        if self.arm.compiler == "inductor" and self.description.random:
            options["fallback_random"] = True  # eager's numbers, else no two arms agree
        compiled = torch.compile(
            call,
            backend=tapped_backend(self.arm.compiler, self._tap, self.spec.memory_budget / 100),
            dynamic=self.spec.dynamic,
            fullgraph=self.spec.fullgraph,
            options=options or None,
        )
        return compiled  # type: ignore[no-any-return]

    def run(
        self,
        tensors: dict[str, F32],
        *,
        tap: bool,
        spec: Spec | None = None,
        focus: int | None = None,
        load: bool = True,
    ) -> Trace:
        """Run the Spec's schedule; with ``tap``, what was multiplied is recorded. Without ``load``,
        the parameters stay as they are.

        ``spec`` may differ from the program's in rows where the graph is dynamic. ``focus`` limits
        an eager model's recording to one of its linears.
        """
        if self.error is not None:
            return Trace(self.arm.name, error=self.error)
        if self.arm.native and (reason := onednn_stays()):
            return Trace(self.arm.name, void=reason)
        run = _Run(self, tensors, spec or self.spec, tap, focus)
        if load:
            try:
                run.load()
            except RuntimeError as error:  # the values are ours: only the device can fail
                raise_if_lost(error, self.device)
                raise
        self.ran = True
        return run.trace()

    @property
    def model(self) -> nn.Module:
        """The converted model. Raises AttributeError where conversion failed."""
        return self._model  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Left:
    """What a run has left: results by name, calls of layers, GEMMs as a tap emits them, attention
    kernels and products of compiled code; live tensors, or on the host."""

    results: dict[str, torch.Tensor]
    calls: list[Call]
    gemms: list[tuple[Any, ...]]
    attention: list[Attended]
    products: list[Product]


class _Run:
    """One run of a program: its tensors, its recordings and how far it came."""

    def __init__(
        self, program: Program, tensors: dict[str, F32], spec: Spec, tap: bool, focus: int | None
    ) -> None:
        self.program, self.tensors, self.spec, self.tap = program, tensors, spec, tap
        self.model, self.arm = program._model, program.arm
        self.phase: ErrorPhase = "forward"
        #: What a tap emits, live.
        self.seen: list[tuple[Any, ...]] = []
        self.forward_count = 0
        self.watch = AttentionWatch()
        self.layers: LayerWatch | None = None
        #: Watching attention means watching every operator: not worth it on every draw.
        self.attention = focus is None or focus % 4 == 0
        if tap and not self.arm.compiler and not spec.direct:
            self.layers = watch_layers(self.model, program._linears, focus)

    def trace(self) -> Trace:
        program, spec = self.program, self.spec
        if program.description.random:
            torch.manual_seed(0)
        try:
            with self._watching():
                output, x = self._schedule()
            if program.device != "cpu":
                torch.cuda.synchronize()  # what kernels raise, they raise late
        except Exception as error:
            raise_if_lost(error, program.device)
            if out_of_memory(error):
                torch.cuda.empty_cache()
                return Trace(self.arm.name, void="the device has no memory left")
            if lack := lacking_kernel(str(error), native=self.arm.native):
                return Trace(self.arm.name, void=lack)
            failed = run_error(error, self.phase)
            if self.arm.compiler:
                program.error = failed  # a compiler that failed once fails as slowly every time
            return Trace(self.arm.name, error=failed)
        needed = (2 if spec.trains else 1) * spec.steps * spec.microbatches
        if self.arm.compiler and program._tap.calls < needed:
            # Dynamo falls back to eager without a word; such a run would pass every comparison
            ran = program._tap.calls
            return Trace(self.arm.name, void=f"{ran} of {needed} compiled graphs ran")
        left = _Left(
            self._results(output, x),
            self.layers.calls if self.layers is not None else [],
            self.seen,
            self.watch.attention + program._tap.watch.attention,
            program._tap.watch.products,
        )
        if program.device != "cpu":
            left = on_host(left)
        return self._trace_of(left)

    def _trace_of(self, left: _Left) -> Trace:
        """The trace of what a run has left."""
        program, spec = self.program, self.spec
        outputs = {name: self._array(name, t) for name, t in left.results.items()}
        attention = attention_of(left.attention)
        plan, census = program.recipe.plan(spec), program._census
        if self.layers is not None:
            shared = frozenset(name.rpartition(".")[0] for name in program._shared)
            autocast = program.recipe.autocast if spec.autocast else None
            rounds = ROUNDED if autocast is None else autocast(program.device)
            calls = calls_of(
                left.calls, plan, shared, rounds, inverse=program.recipe.inverse_scales
            )
            return Trace(self.arm.name, outputs, calls=calls, attention=attention, census=census)
        multiplied = multiplied_of(left.products)
        if not self.tap or not plan.quantised or not spec.direct:
            return Trace(
                self.arm.name, outputs, multiplied=multiplied, attention=attention, census=census
            )
        seen = [seen_of(gemm, inverse=program.recipe.inverse_scales) for gemm in left.gemms]
        if self.arm.compiler:
            seen = [(m.a, m.b) for m in multiplied]
            self.forward_count = sum(m.phase == "forward" for m in multiplied)
        sites, unobserved = name_sites(seen, self.forward_count, spec, self.arm, plan)
        return Trace(
            self.arm.name, outputs, sites, multiplied=multiplied, unobserved=unobserved,
            census=census,
        )  # fmt: skip

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.arm.native:
                stack.enter_context(without_onednn())
            if self.arm.compiler:
                stack.enter_context(self.program._tap.recording(self.tap))
            elif self.layers is not None:
                stack.enter_context(self.layers.recording())
                stack.enter_context(self._tapped(self.layers.emit, self.layers.wanted))
                if self.program.description.attends and self.attention:
                    stack.enter_context(self.watch)
            elif self.tap:
                stack.enter_context(self._tapped(self._emit))
            yield

    def _tapped(
        self, take: Callable[..., None], wanted: Callable[[], bool] = lambda: True
    ) -> AbstractContextManager[None]:
        return self.program.recipe.tap(Emit(take, wanted))

    def _emit(self, *gemm: Any) -> None:
        self.seen.append(gemm)

    def _schedule(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Every step's forwards and backwards; returns the last output and its input."""
        spec = self.spec
        optimizer = self._optimizer()
        for step in range(spec.steps):
            if optimizer is not None and step:
                optimizer.zero_grad()
            for microbatch in range(spec.microbatches):
                # every microbatch is the same rows, turned by one more
                turn = step * spec.microbatches + microbatch
                output, x = self._forward_backward(turn)
            if optimizer is not None:
                optimizer.step()
        return output, x

    def _forward_backward(self, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        spec, device = self.spec, self.program.device
        rows = self.tensors["input"] if not turn else _turned(self.tensors["input"], turn)
        ids = self.program.description.takes_ids
        x = ids_tensor(rows, spec, device) if ids else input_tensor(rows, spec, device)
        self.phase = "forward"
        with _grad_mode(spec), torch.autocast(device, torch.bfloat16, enabled=spec.autocast):
            # a model's input is nobody's leaf: autocast would cache a leaf's cast, which a probe
            # between leaf and layer prevents
            leaf = spec.direct or not x.requires_grad
            output = self.program._call(x if leaf else x.view_as(x))
        self.forward_count += len(self.seen)
        if spec.trains:
            self.phase = "backward"
            g = grad_tensor(self.tensors["grad_output"], spec, device)
            output.backward(g.to(output.dtype))
        return output, x

    def _optimizer(self) -> torch.optim.Optimizer | None:
        """None for a single step: then gradients are all there is to see."""
        if self.spec.steps == 1 or not self.spec.trains:
            return None
        trained = [p for p in self.model.parameters() if p.requires_grad]
        kind = torch.optim.SGD if self.spec.optimizer == "sgd" else torch.optim.AdamW
        return kind(trained, lr=LEARNING_RATE[self.spec.optimizer])

    def load(self) -> None:
        """Write the case's values into the parameters and clear their gradients."""
        spec, names = self.spec, _LINEAR if self.spec.direct else self.program._shared
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                values = self.tensors[names.get(name, name)]
                parameter.copy_(to_torch(values, spec.dtype, self.program.device))
                parameter.grad = None

    def _results(self, output: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Results by name, live; of a library's own tensor what is inside."""
        spec = self.spec
        named = {"output": output.detach()}
        if x.grad is not None:
            named["grad_input"] = x.grad
        for name, parameter in self.model.named_parameters():
            grad: Any = parameter.grad
            if grad is not None:
                named[_grad_name(spec, name)] = getattr(grad, "_data", grad)
            if spec.steps > 1:
                named[name] = getattr(parameter, "_data", parameter).detach()
        return named

    def _array(self, name: str, t: torch.Tensor) -> F32:
        """A result as float32, inputs and outputs by rows."""
        spec, widths = self.spec, {"output": self.spec.width, "grad_input": self.spec.k}
        if name in widths:
            return as_rows(t, spec, widths[name])
        # the next draw overwrites parameters, and may add to their gradients
        return fp32_array(t) if spec.direct and spec.steps == 1 else fp32_array(t).copy()


def _grad_name(spec: Spec, name: str) -> str:
    return f"grad_{_LINEAR[name]}" if spec.direct else f"{name}.grad"


def _turned(rows: F32, turn: int) -> F32:
    return np.roll(rows, turn, axis=0)


@contextmanager
def _grad_mode(spec: Spec) -> Iterator[None]:
    mode = {"train": torch.enable_grad, "no_grad": torch.no_grad}.get(
        spec.grad_mode, torch.inference_mode
    )
    with mode():
        yield


def run_error(error: BaseException, phase: ErrorPhase) -> RunError:
    """What a library raised, with the innermost of *its* functions."""
    theirs = in_libraries(tb.extract_tb(error.__traceback__))
    where = f"{module_of(theirs[-1].filename)}.{theirs[-1].name}" if theirs else "?"
    return RunError(
        phase=phase,
        type=type(error).__name__,
        message=str(error)[:4000],
        where=where,
        traceback="".join(tb.format_exception(error))[-8000:],
    )
