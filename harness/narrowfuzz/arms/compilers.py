"""The torch.compile backend of each compiled arm, with a tap inside every graph it compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from narrowfuzz.arms.operators import GraphWatch
from narrowfuzz.machine import isa as vectors
from narrowfuzz.play.watches import let_rng_pass

#: The taps of the programs that are running now, the innermost last.
_recording: list[CompiledTap] = []


class CompiledTap:
    """Counts the calls of one program's compiled graphs and, while recording is on, records the
    operators that run in them."""

    def __init__(self) -> None:
        self.watch = GraphWatch()
        self._on = False
        self.calls = 0

    @contextmanager
    def recording(self, on: bool) -> Iterator[None]:
        self.watch, self._on, self.calls = GraphWatch(), on, 0
        _recording.append(self)
        try:
            yield
        finally:
            _recording.pop()
            self._on = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The context in which a compiled graph runs."""
        self.calls += 1
        with ExitStack() as stack:
            if self._on:
                stack.enter_context(self.watch)
            yield


def tapped_backend(compiler: str, tap: CompiledTap, memory_budget: float) -> Any:
    """The torch.compile backend of that name, with ``tap`` inside every graph it compiles."""
    from torch._functorch import config as functorch_config

    let_rng_pass(GraphWatch)
    if compiler == "inductor":
        _watch_inductor()
        vectors.probe_and_cache()

    def backend(graph: Any, example_inputs: Any, *, options: Any = None) -> Any:
        # a budget of 1 is the default: it must not override a user's setting
        limited = {"activation_memory_budget": memory_budget} if memory_budget < 1 else {}
        with functorch_config.patch(limited):
            if compiler == "inductor":
                from torch._inductor.compile_fx import compile_fx

                return compile_fx(graph, example_inputs, config_patches=dict(options or {}))
            return _eager_graphs(compiler, tap)(graph, example_inputs)

    return backend


def _eager_graphs(compiler: str, tap: CompiledTap) -> Any:
    """AOT autograd with graphs that run eagerly, as torch's own backends of these names do."""
    from functorch.compile import make_boxed_func

    def run_inside(graph: Any, example_inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            with tap.inside():
                return graph(*args)

        return make_boxed_func(call)

    return _GRAPHS[compiler](run_inside)


def _traced(run: Any) -> Any:
    from torch._dynamo.backends.debugging import aot_eager

    return partial(aot_eager, fw_compiler=run, bw_compiler=run)


def _partitioned(run: Any) -> Any:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import select_decomp_table

    return aot_autograd(
        fw_compiler=run,
        bw_compiler=run,
        decompositions=select_decomp_table,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )


#: Compiler's name -> function that makes a backend of a function that runs a graph.
_GRAPHS: dict[str, Callable[[Any], Any]] = {
    "aot_eager": _traced,
    "aot_eager_decomp_partition": _partitioned,
}


def _watch_inductor() -> None:
    """Make CompiledFxGraph.__call__ run inside the innermost tap, if there is one. Idempotent."""
    from torch._inductor.output_code import CompiledFxGraph

    plain: Callable[..., Any] = CompiledFxGraph.__call__
    if getattr(plain, "_narrowfuzz", False):
        return

    def call(self: Any, inputs: Any) -> Any:
        tap = _recording[-1] if _recording else None
        if tap is None:
            return plain(self, inputs)
        with tap.inside():
            return plain(self, inputs)

    call._narrowfuzz = True  # type: ignore[attr-defined]
    CompiledFxGraph.__call__ = call  # type: ignore[method-assign]
