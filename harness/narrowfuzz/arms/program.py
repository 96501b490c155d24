"""Builds one program for (Spec, arm) and runs it on any number of data draws.

The program is built, converted and compiled once; every draw overwrites its parameters in place.
Exceptions of the library under test become the Trace's error; our own are not caught.
"""

from __future__ import annotations

import traceback as tb
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from narrowfuzz.arms.census import RecipeError, convert, converted_by
from narrowfuzz.arms.compilers import CompiledTap, tapped_backend
from narrowfuzz.arms.frames import in_libraries, module_of, of_the_model
from narrowfuzz.arms.jobs import job_of, with_model_names
from narrowfuzz.arms.layers import calls_of, is_linear, layers_of
from narrowfuzz.arms.lost import CannotRecord, out_of_memory, raise_if_lost
from narrowfuzz.arms.model_names import linear_names, other_names, tied_names
from narrowfuzz.arms.operators import EagerWatch, LiveCall, operators_of
from narrowfuzz.arms.recordings import attention_of, multiplied_of, seen_of
from narrowfuzz.arms.sites import name_sites
from narrowfuzz.arms.tensors import as_float, as_rows, fp32_array
from narrowfuzz.arms.transfer import on_host
from narrowfuzz.case.arm import Arm
from narrowfuzz.case.kind import kind_of
from narrowfuzz.case.spec import Spec
from narrowfuzz.machine.machine import lacking_kernel, onednn_stays
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import F32
from narrowfuzz.numerics.plan import Plan
from narrowfuzz.play import converted, player
from narrowfuzz.play.dtypes import DTYPES
from narrowfuzz.play.job import Compile, Event, Job, Taps
from narrowfuzz.play.kernels import eagerly, on_threads, without_onednn
from narrowfuzz.play.layers import Call, LayerWatch
from narrowfuzz.play.names import name_of
from narrowfuzz.play.running import Running
from narrowfuzz.play.watches import Attended, Product, unseen
from narrowfuzz.recipe.recipe import ROUNDED, Emit, Recipe
from narrowfuzz.trace.trace import ErrorPhase, RunError, Trace, message_of


class Program:
    """A model that is built, converted and, on a compiled arm, compiled."""

    def __init__(self, spec: Spec, recipe: Recipe, arm: Arm, *, device: str = "cpu") -> None:
        self.spec, self.recipe, self.arm, self.device = spec, recipe, arm, device
        self.description = MODELS[spec.model]
        self.error: RunError | None = None
        self._tap = CompiledTap()
        #: Whether it has run: the first run of a compiled program compiles it.
        self.ran = False
        try:
            with torch.no_grad():
                self._model = self._build()
            changing = self.description.changing
            #: Initial values of the buffers that forwards change.
            self._buffers = {n: b.clone() for n, b in self._model.named_buffers() if n in changing}
            #: Shared with the callable below: a recompute reports which forward it repeats.
            self._training = player.Training(self._model)
            self._prepare()
            self._call = self._training.call
        except RecipeError:
            raise
        except Exception as error:
            raise_if_lost(error, self.device)
            self.error = run_error(error, "convert")

    def _build(self) -> nn.Module:
        spec = self.spec
        plain = self._plain()
        names = linear_names(plain)
        before = {n: (type(m), _forward(m)) for n, m in plain.named_modules(remove_duplicate=False)}
        self._shared, others = tied_names(plain), other_names(plain)
        model, self._census = convert(self.recipe, plain, spec)
        modules = dict(model.named_modules(remove_duplicate=False))
        # a conversion may make several modules of one that has several names
        names += tuple(n for n, of in others.items() if self._split(modules, n, of))
        self._linears = tuple(
            n for n in names if n in modules and self._judges(modules[n], *before[n])
        )
        return converted.renewed(model, self._anew, lifecycle=spec.lifecycle)

    def _judges(self, module: nn.Module, kind: type[nn.Module], forward: Any) -> bool:
        """Is this module of the converted model, which had this class and forward before, a linear
        to judge? One that a user gave a class of its own is none, unless the recipe converts it:
        to another class, or where nn.Linear's forward ran."""
        if type(module) is kind and kind.forward is not nn.Linear.forward:
            return False  # such as a library's layer that quantises for itself
        replaced = type(module) is not kind or forward is nn.Linear.forward
        return is_linear(module) or (replaced and self._converted(module))

    def _split(self, modules: Mapping[str, nn.Module], name: str, of: str) -> bool:
        """Has the linear with these two names been converted into a module for each?"""
        made = modules.get(name)
        return made is not None and made is not modules.get(of) and self._converted(made)

    def _converted(self, module: nn.Module) -> bool:
        return self.recipe.converted is not None and self.recipe.converted(module)

    def _plain(self) -> nn.Module:
        dtype = DTYPES[self.spec.dtype]
        plain = self.description.build(self.spec, dtype=dtype, device=self.device)
        layout = self.spec.weight_layout
        return plain if layout == "contiguous" else player.in_memory(plain, layout)

    def _anew(self) -> nn.Module:
        return converted_by(self.recipe, self._plain(), self.spec)  # type: ignore[no-any-return]

    def _prepare(self) -> None:
        """Set how the trained model is called; compiled graphs get the tap."""
        job = self.job
        if self.arm.compiler:
            # the tap's backend sets the budget itself
            budget = job.compile.memory_budget
            backend = tapped_backend(self.arm.compiler, self._tap, budget)
            job = replace(job, compile=Compile(backend, job.compile.options))
        watch = () if self.arm.compiler else self._linears
        self._training.call = converted.called(self._training, job=job, taps=Taps(watch=watch))

    @cached_property
    def plan(self) -> Plan:
        """The recipe's plan for the program's own Spec."""
        return self.recipe.plan(self.spec)

    @cached_property
    def job(self) -> Job:
        """The training of the program's own Spec."""
        return self.job_of(self.spec)

    def job_of(self, spec: Spec, events: tuple[Event, ...] | None = None) -> Job:
        """The training of a Spec that the program's model can run; ``events`` replace its own."""
        return replace(job_of(spec, self.arm, self.device, events), tied=self._shared)

    def run(
        self,
        tensors: dict[str, F32],
        *,
        tap: bool,
        spec: Spec | None = None,
        focus: int | None = None,
        events: tuple[Event, ...] | None = None,
    ) -> Trace:
        """Run the Spec's events, or ``events`` if given; with ``tap``, operands of GEMMs and calls
        of layers and operators are recorded.

        ``spec`` may differ from the program's in the number of rows where the graph is dynamic.
        ``focus`` limits the recording of an eager model to one of its linears (``layers_of``).
        """
        if self.error is not None:
            return Trace(self.arm.name, error=self.error)
        if self.arm.native and (reason := onednn_stays()):
            return Trace(self.arm.name, unusable_because=reason)
        self.ran = True
        return _Run(self, tensors, spec or self.spec, tap, focus, events).trace()

    def watched(self, tensors: dict[str, F32]) -> tuple[Trace, list[Call]]:
        """An eager run of the model, and the calls of all its modules with their inputs and
        outputs; no calls where the run fails."""
        if self.error is not None:
            return Trace(self.arm.name, error=self.error), []
        run = _Run(self, tensors, self.spec, True, None, None)
        assert run.layers is not None
        run.layers.everything = True
        trace = run.trace()
        return trace, run.layers.calls if trace.error is None and not trace.unusable_because else []

    def modules(self) -> dict[str, nn.Module]:
        """The model's modules by all their names."""
        return dict(self._model.named_modules(remove_duplicate=False))

    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters by all their names."""
        return dict(self._model.named_parameters(remove_duplicate=False))


@dataclass(frozen=True)
class _Recorded:
    """The recordings of a run: results by name, calls of layers, GEMMs as a tap emits them,
    attention kernels, calls of operators and products of compiled code. The tensors are live, or
    copies on the host."""

    results: dict[str, torch.Tensor]
    calls: list[Call]
    gemms: list[tuple[Any, ...]]
    attention: list[Attended]
    operators: list[LiveCall]
    unjudged: dict[str, str]
    products: list[Product]


class _Run:
    """One run of a program: its tensors, its recordings and how far it came."""

    def __init__(
        self,
        program: Program,
        tensors: dict[str, F32],
        spec: Spec,
        tap: bool,
        focus: int | None,
        events: tuple[Event, ...] | None,
    ) -> None:
        self.program, self.spec, self.tap, self.focus = program, spec, tap, focus
        self.arm = program.arm
        self.tensors = {
            name: torch.from_numpy(np.asarray(x, order="C"))  # a single number keeps its shape
            for name, x in with_model_names(spec, tensors).items()
        }
        own = events is None and spec == program.spec
        self.job = program.job if own else program.job_of(spec, events)
        self.plan = program.plan if spec == program.spec else program.recipe.plan(spec)
        self.training = program._training
        self.played = player.Trace()
        #: Live operands of the GEMMs that a single linear has run since its last forward began, as
        #: the recipe's tap emits them; the first ``forward_count`` belong to that forward.
        self.seen: list[tuple[Any, ...]] = []
        self.forward_count, self.forward = 0, 0
        self.layers: LayerWatch | None = None
        self.running = Running()
        self.watch: EagerWatch | None = None
        if tap and not self.arm.compiler and kind_of(spec).judges_each_linear:
            self.layers = LayerWatch(self.training)
            if _watches_operators(program, spec, focus):
                self.watch = EagerWatch(self.running)

    def trace(self) -> Trace:
        program = self.program
        try:
            self._load()
        except RuntimeError as error:  # the values are ours: only the device can fail
            raise_if_lost(error, program.device)
            raise
        if program.description.random:
            player.seed(0)
        try:
            with self._watching():
                self._train()
            if program.device != "cpu":
                torch.cuda.synchronize()  # errors of kernels are raised asynchronously
        except (CannotRecord, RecipeError):
            raise
        except Exception as error:
            raise_if_lost(error, program.device)
            if out_of_memory(error):
                torch.cuda.empty_cache()
                return Trace(self.arm.name, unusable_because="the device has no memory left")
            if lack := lacking_kernel(str(error), native=self.arm.native):
                return Trace(self.arm.name, unusable_because=lack)
            failed = run_error(error, self.played.phase)  # type: ignore[arg-type]
            if self.layers is not None and (call := self.layers.running()) is not None:
                failed = replace(failed, layer=call.module, sizes=call.sizes)
            if self.arm.compiler:
                program.error = failed  # a second attempt would fail again, just as slowly
            return Trace(self.arm.name, census=program._census, error=failed)
        ran, needed = program._tap.calls, sum(map(_graphs, self.job.events))
        if self.arm.compiler and ran < needed:
            # Dynamo falls back to eager without a word; such a run would pass every comparison
            why = f"{ran} of {needed} compiled graphs ran; Dynamo ran the rest in eager mode"
            return Trace(self.arm.name, unusable_because=why)
        watch = program._tap.watch if self.watch is None else self.watch
        recorded = _Recorded(
            player.in_order(self.played.kept),
            self.layers.calls if self.layers is not None else [],
            self.seen,
            watch.attention,
            watch.operators,
            watch.unjudged,
            program._tap.watch.products,
        )
        if program.device != "cpu":
            recorded = on_host(recorded)
        return self._trace_of(recorded)

    def _load(self) -> None:
        """Load the case's values into the parameters, and clear gradients and the state of earlier
        runs."""
        program, run = self.program, self.training
        run.model, run.call, run.optimizer, run.began = program._model, program._call, None, None
        run.backward, run.load = torch.autograd.backward, nn.Module.load_state_dict
        run.anew, run.prepare = self._anew, self._prepare
        run.shapes = self.job.input_shape, self.job.output_shape
        run.region = converted.regions_of(program.device, self.job.autocast)
        run.live.clear()
        with torch.no_grad():
            if program.spec.weight_layout == "strided":
                clear_memory(run.model)
            converted.fill(run.model, self.tensors, job=self.job)
            for name, began in program._buffers.items():
                run.model.get_buffer(name).data.copy_(began)  # .data: a graph may have saved it

    def _train(self) -> None:
        events = self.job.events
        # in inference mode composed functions reach a dispatch mode whole, and below autocast: what
        # a user's model computes inside of it may have other bits
        taps = Taps(inference=unseen if self.program.description.own else None)
        player.train(self.played, self.training, self.tensors, events, job=self.job, taps=taps)
        player.keep_state(self.played, self.training, job=self.job)

    def _anew(self) -> nn.Module:
        """A new model for a reload. What runs while it is built is not part of the training."""
        with nullcontext() if self.watch is None else self.watch.paused():
            return self.program._anew()

    def _prepare(self) -> None:
        self.program._prepare()
        self._follow()

    def _follow(self) -> None:
        if self.layers is None:
            return
        model = self.training.model
        self.running.follow(model)
        if self.watch is not None:
            self.watch.linears = frozenset(layers_of(model, self.program._linears, None))
        if self.layers.everything:
            self.layers.follow({name: m for name, m in model.named_modules() if name})
        else:
            self.layers.follow(layers_of(model, self.program._linears, self.focus))

    def _trace_of(self, recorded: _Recorded) -> Trace:
        """The trace of the recordings of a run."""
        program, spec = self.program, self.spec
        called = spec.gradients
        outputs = {
            called.get(name, name): self._array(name, t) for name, t in recorded.results.items()
        }
        attention, operators = attention_of(recorded.attention), operators_of(recorded.operators)
        plan, census = self.plan, program._census
        if self.layers is not None:
            used = program.description.gradients.elsewhere
            shared = frozenset((*program._shared, *program._shared.values(), *used))
            autocast = program.recipe.autocast  # a model may enter autocast by itself
            rounds = ROUNDED if autocast is None else autocast(program.device)
            calls = calls_of(
                recorded.calls, plan, shared, rounds, inverse=program.recipe.inverse_scales
            )
            return Trace(
                self.arm.name,
                outputs,
                calls=calls,
                attention=attention,
                operators=operators,
                unjudged=recorded.unjudged,
                census=census,
            )
        multiplied = multiplied_of(recorded.products)
        trace = Trace(self.arm.name, outputs, multiplied=multiplied, census=census)
        if not self.tap or not plan.quantised or kind_of(spec).judges_each_linear:
            return replace(trace, attention=attention, operators=operators)
        seen = [seen_of(gemm, inverse=program.recipe.inverse_scales) for gemm in recorded.gemms]
        if self.arm.compiler:
            seen = [(m.a, m.b) for m in multiplied]
            self.forward_count = sum(m.phase == "forward" for m in multiplied)
        sites, unobserved = name_sites(seen, self.forward_count, spec, self.arm, plan)
        return replace(trace, sites=sites, unobserved=unobserved)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(player.leave, self.training)
            if self.arm.native:
                stack.enter_context(without_onednn())
            stack.enter_context(on_threads(self.spec.threads))
            if self.arm.compiler:
                stack.enter_context(self.program._tap.recording(self.tap))
            else:
                stack.enter_context(eagerly())
            if self.layers is not None:
                stack.enter_context(set_checkpoint_early_stop(False))
                stack.enter_context(self.layers.recording())
                stack.callback(self.running.leave)
                self._follow()
                stack.enter_context(self._tapped(self.layers.emit, self.layers.wanted))
                if self.watch is not None:
                    stack.enter_context(self.watch)
            elif self.tap and not self.arm.compiler:
                stack.enter_context(self._tapped(self._emit))
            yield

    def _tapped(
        self, take: Callable[..., None], wanted: Callable[[], bool] = lambda: True
    ) -> AbstractContextManager[None]:
        return self.program.recipe.tap(Emit(take, wanted))

    def _emit(self, *gemm: Any) -> None:
        if self.played.phase == "forward":
            if self.forward != self.training.forward:
                self.seen, self.forward_count, self.forward = [], 0, self.training.forward
            self.forward_count += 1
        self.seen.append(gemm)

    def _array(self, name: str, t: torch.Tensor) -> F32:
        """A result as float32; outputs and input gradients as [rows, features]."""
        spec, widths = self.spec, {"output": self.spec.width, "grad_input": self.spec.k}
        kind, t = name_of(name).kind, as_float(t)
        if kind in widths:
            return as_rows(t, spec, widths[kind])
        # the next draw overwrites parameters, and may add to their gradients
        return fp32_array(t).copy()


def _watches_operators(program: Program, spec: Spec, focus: int | None) -> bool:
    """Does this run of an eager model record the calls of attention and other operators?

    That takes a dispatch mode, which runs Python for every kernel, and emulated formats run
    thousands of kernels. So it is entered on a Spec's first draw, which has no ``focus``, and if
    the model has attention on every fourth draw. A model that is one operator always runs in it,
    and so does every model on a GPU or on several threads, where kernels may add up in no fixed
    order: only a recorded call says so. An arm with checkpoints runs the same kernels as the plain
    one, so it is entered there only for models that have attention or are one operator.
    """
    attends, single_operator = program.description.attends, spec.single_operator
    if program.arm.checkpoint and not attends and not single_operator:
        return False
    if focus is None or single_operator or program.device != "cpu" or spec.threads > 1:
        return True
    return attends and focus % 4 == 0


def clear_memory(model: nn.Module) -> None:
    """Set the memory of all parameters to 0, also between their elements, where kernels that ignore
    strides write."""
    for parameter in model.parameters():
        if type(parameter.data) is torch.Tensor:
            whole = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            whole.set_(parameter.untyped_storage()).zero_()


def _forward(module: nn.Module) -> Any:
    """The function that a call of this module runs."""
    return vars(module).get("forward", type(module).forward)


def _graphs(event: Event) -> int:
    """How many compiled graphs an event runs."""
    match event:
        case ("forward", *_):
            return 1
        case ("backward", _, of, _):
            return len(of)
    return 0


def run_error(error: BaseException, phase: ErrorPhase) -> RunError:
    """The record of a library's exception, with the innermost of *its* functions."""
    frames = tb.extract_tb(error.__traceback__)
    theirs = in_libraries(frames)
    where = f"{module_of(theirs[-1].filename)}.{theirs[-1].name}" if theirs else "?"
    return RunError(
        phase=phase,
        type=type(error).__name__,
        message=message_of(error)[:4000],
        where=where,
        line=f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "",
        own=of_the_model(frames),
    )
