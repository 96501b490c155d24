"""Faults in torch's own checkpoint: recompute does not get back the state of its forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from narrowfuzz.plants.patching import attribute_replaced, in_backward
from narrowfuzz.plants.plant import Plant

_ALL = ("torch.fp32", "torch.bf16", "torchao.*")


@contextmanager
def _random_state_lost() -> Iterator[None]:
    """Neither kind of checkpoint restores the random generator before it recomputes."""
    from torch.utils import checkpoint

    def generator(original: Any) -> Any:
        return lambda function, preserve, *args, **kwargs: original(
            function, False, *args, **kwargs
        )

    def reentrant(original: Any) -> Any:
        class Function:
            @staticmethod
            def apply(function: Any, preserve: Any, *args: Any) -> Any:
                return original.apply(function, False, *args)

        return Function

    with ExitStack() as stack:
        for name, make in (
            ("_checkpoint_without_reentrant_generator", generator),
            ("CheckpointFunction", reentrant),
        ):
            stack.enter_context(attribute_replaced(checkpoint, name, make))
        yield


@contextmanager
def _autocast_lost() -> Iterator[None]:
    """Recompute runs outside the autocast region that its forward ran in."""
    from torch.utils import checkpoint

    def make(original: Any) -> Any:
        def outside(*args: Any, **kwargs: Any) -> Any:
            return tuple(
                None if state is None else {**state, "enabled": False}
                for state in original(*args, **kwargs)
            )

        return outside

    with attribute_replaced(checkpoint, "_get_autocast_kwargs", make):
        yield


@contextmanager
def _kept_results_swapped() -> Iterator[None]:
    """The results that a selective checkpoint policy saved come back in reverse order, if all have
    one shape."""
    import torch
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _VersionWrapper

    def make(enter: Any) -> Any:
        def entered(self: Any) -> Any:
            if torch.compiler.is_compiling():
                return enter(self)
            for results in self.storage.values():
                saved = [i for i, r in results.items() if isinstance(r, _VersionWrapper)]
                shapes = {results[i].val.shape for i in saved}
                if len(saved) > 1 and len(shapes) == 1:
                    backwards = [results[i] for i in reversed(saved)]
                    results.update(zip(saved, backwards, strict=True))
            return enter(self)

        return entered

    with attribute_replaced(_CachedTorchDispatchMode, "__enter__", make):
        yield


@contextmanager
def _norm_rounds_otherwise() -> Iterator[None]:
    """A recomputed norm differs in the lowest bit of every 16th element, as if it were reduced in
    another order."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    bits = {2: torch.int16, 4: torch.int32}

    def make(norm: Any) -> Any:
        def normalise(x: Any, *args: Any) -> Any:
            out = norm(x, *args)
            if in_backward() and not torch.compiler.is_compiling():
                with _disable_current_modes():  # checkpoint policies count operators
                    out.data.view(bits[out.element_size()]).view(-1)[::16] ^= 1
            return out

        return normalise

    # not torch.nn.functional.rms_norm: that one passes itself to function modes
    with attribute_replaced(torch, "rms_norm", make):
        yield


PLANTS = [
    Plant(
        "checkpoint-forgets-generator",
        "recompute",
        "recompute drops out other elements",
        "https://github.com/pytorch/pytorch/issues/198333",
        _ALL,
        _random_state_lost,
    ),
    Plant(
        "checkpoint-forgets-autocast",
        "recompute",
        "recompute runs outside autocast",
        "https://github.com/pytorch/pytorch/issues/148831",
        ("torch.fp32",),
        _autocast_lost,
    ),
    Plant(
        "checkpoint-swaps-kept",
        "recompute",
        "kept products come back in another order",
        "https://github.com/pytorch/pytorch/issues/175306",
        _ALL,
        _kept_results_swapped,
    ),
    Plant(
        "recompute-rounds-otherwise",
        "recompute",
        "a recomputed norm has other low bits",
        "https://github.com/pytorch/pytorch/issues/186572",
        _ALL,
        _norm_rounds_otherwise,
    ),
]
