"""Make Triton's kernels run on the CPU, in Triton's interpreter, with the results of a GPU."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from triton_on_cpu.memory import LAUNCH, OutsideError, WrittenTwiceError

_installed: list[str] = []
#: Attributes that the interpreter must have; a release that lacks one is not supported.
_BUILDER = (
    "binary_op", "cast_impl", "create_atomic_cas", "create_atomic_rmw", "create_clampf",
    "create_dot", "create_erf", "create_fma", "create_fp_to_fp", "create_fp_to_si",
    "create_fp_to_ui", "create_inline_asm", "create_masked_load", "create_masked_store",
    "create_maximumf", "create_maxnumf", "create_minimumf", "create_minnumf", "unary_op",
)  # fmt: skip
_MODULE = (
    "GridExecutor",
    "InterpreterBuilder",
    "InterpreterError",
    "ReduceOps",
    "ScanOps",
    "TensorHandle",
    "_get_np_dtype",
    "_patch_attr",
    "_patch_builtin",
    "_patch_lang_tensor",
    "interpreter_builder",
)


def install() -> str:
    """Interpret every kernel that is defined from now on. Returns Triton's version.

    Patches Triton and torch until the process ends, so call it in a process of its own, before the
    library whose kernels are to run is imported. A second call does nothing. Raises ValueError with
    the reason if Triton is not installed, is already imported without its interpreter, or has an
    interpreter that lacks what is patched.
    """
    if _installed:
        return _installed[0]
    if importlib.util.find_spec("triton") is None:
        raise ValueError("there is no Triton: pip install triton==3.6.0, or --with triton==3.6.0")
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "Triton is imported already, without its interpreter; call install() before, in a "
            "process of its own, or set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    from triton.runtime import interpreter

    _check(interpreter, triton.__version__)
    from triton_on_cpu.repairs import repair
    from triton_on_cpu.speed import install_caches

    repair()
    install_caches()
    _one_at_a_time(interpreter)
    _one_candidate()
    _as_if_compiled()
    _installed.append(triton.__version__)
    return _installed[0]


def _check(interpreter: Any, version: str) -> None:
    lacking = [name for name in _MODULE if not hasattr(interpreter, name)]
    builder = getattr(interpreter, "InterpreterBuilder", None)
    lacking += [name for name in _BUILDER if not hasattr(builder, name)]
    if lacking:
        raise ValueError(
            f"the interpreter of Triton {version} is another than that of 3.6: it has no "
            f"{', '.join(lacking)}; install triton==3.6.0"
        )


def _one_at_a_time(interpreter: Any) -> None:
    """Run one launch at a time, since each patches ``triton.language`` for the whole process;
    without numpy's warnings about NaN and overflow; and refuse the fake tensors of a compiler,
    which have no data to interpret."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    launch, lock = interpreter.GridExecutor.__call__, threading.RLock()

    def launch_alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        if any(isinstance(x, FakeTensor | FunctionalTensor) for x in arguments.values()):
            raise TypeError(
                f"Triton's interpreter takes no fake tensors: what calls {self.fn.__name__} is not "
                "compiled without a GPU"
            )
        with lock, np.errstate(all="ignore"), LAUNCH.of(self.fn.__name__, arguments):
            try:
                return launch(self, *args, **kwargs)
            except interpreter.InterpreterError as error:
                if isinstance(error.__cause__, OutsideError | WrittenTwiceError):
                    raise error.__cause__.with_traceback(None) from None
                raise

    interpreter.GridExecutor.__call__ = launch_alone


def _one_candidate() -> None:
    """Choose one candidate configuration of an autotuned kernel by the sizes of the launch, always
    the same for the same sizes. Timing the candidates needs a GPU, where any of them may win."""
    from triton.runtime.autotuner import Autotuner

    run = Autotuner.run

    def of_sizes(self: Any, *args: Any, **kwargs: Any) -> Any:
        every, self.nargs = self.configs, dict(zip(self.arg_names, args, strict=False))
        left = self.prune_configs(kwargs)
        self.configs = [left[candidate(self.fn.__name__, (*args, *kwargs.values()), len(left))]]
        try:
            return run(self, *args, **kwargs)
        finally:
            self.configs = every

    Autotuner.run = of_sizes


def candidate(kernel: str, arguments: Iterable[Any], count: int) -> int:
    """The index, below ``count``, of the candidate for a launch with these arguments: from a digest
    of the kernel's name and of the integers among the arguments."""
    sizes = [x for x in arguments if isinstance(x, int) and not isinstance(x, bool)]
    digest = hashlib.sha256(f"{kernel} {sizes}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % count


def _as_if_compiled() -> None:
    """Make torch report that Triton is available, and accept interpreted kernels unwrapped."""
    import torch._library.triton as registry
    import torch.library
    import torch.utils._triton as question

    question.has_triton = question.has_triton_package = lambda: True

    def itself(kernel: Any) -> Any:
        return kernel

    torch.library.wrap_triton = registry.wrap_triton = itself
