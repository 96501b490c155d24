"""TransformerEngine 1.x on the CPU: import it with the emulation in place of its extension."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from te_on_cpu import cuda_names, v1, v1_gemm, v1_norms
from te_on_cpu.refusal import refused
from te_on_cpu.v1_names import EXTENSION, plain_names

#: The flash-attn version that 1.9 to 1.11 require to import; none of its functions is emulated.
_FLASH_ATTN = "2.5.8"
_FLASH_ATTN_MODULES = ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_2_cuda")
#: Not emulated, but looked up in a module that gets them by ``import *``, so they must exist.
_REFUSED = ("dgeglu", "dgelu", "dqgelu", "dreglu", "drelu", "dsrelu", "dswiglu")


def install_v1(version: str) -> None:
    """Import TransformerEngine ``version`` (1.9 to 1.13) on the CPU, until this process ends."""
    os.environ["NVTE_TORCH_COMPILE"] = "0"  # do not compile its small functions
    cuda_names.patch()
    major, minor = (int(part) for part in version.split(".")[:2])
    functions = script_functions(extension_functions((major, minor)))
    torch.ops.tex_ts = _module("torch.ops.tex_ts", functions)
    _stand_in_for_onnx()
    flash_attn = _flash_attn() if (major, minor) < (1, 12) else nullcontext()
    with _found((major, minor)), flash_attn, mock.patch("torch.jit.script", _as_it_is):
        importlib.import_module("transformer_engine.pytorch")


def extension_names(since: v1.Version) -> dict[str, Any]:
    """The contents of the extension module: the emulated names, and a ``__getattr__`` that refuses
    all others."""
    return vars(_module(EXTENSION, {**plain_names(since), **extension_functions(since)}))


def extension_functions(since: v1.Version) -> dict[str, Callable[..., Any]]:
    """The emulated functions of the extension module, by name."""
    versioned = (
        v1.cast_to_fp8,
        v1.cast_to_fp8_noalloc,
        v1.fused_cast_transpose_noop,
        v1.fused_cast_transpose_bgrad,
        v1_gemm.te_gemm,
        *v1_norms.VERSIONED,
    )
    plain = (
        v1.cast_from_fp8,
        v1.fp8_transpose,
        v1.fp8_transpose_noalloc,
        v1.fp8_transpose_noalloc_noop,
        v1.fused_amax_and_scale_update_after_reduction,
        *v1_norms.PLAIN,
    )
    return {
        "get_cublasLt_version": lambda: 120500,
        "get_cudnn_version": lambda: 90300,
        "device_supports_multicast": lambda: False,
        "ubuf_built_with_mpi": lambda: False,
        **{name: refused(name) for name in _REFUSED},
        **{f.__name__: f for f in plain},
        **{f.__name__: functools.partial(f, since=since) for f in versioned},
    }


def script_functions(functions: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The functions of ``torch.ops.tex_ts``: the same, with one offset for scale, amax and
    1/scale."""

    def same(offset: int) -> dict[str, int]:
        return dict.fromkeys(("scale_offset", "amax_offset", "scale_inv_offset"), int(offset))

    def cast_to_fp8_ts(*args: Any) -> Any:
        *addresses, offset, otype = args
        return functions["cast_to_fp8"](*addresses, otype, **same(offset))

    def cast_to_fp8_noalloc_ts(*args: Any) -> Any:
        *addresses, offset, otype = args
        functions["cast_to_fp8_noalloc"](*addresses, otype, **same(offset))
        return args[2]

    def cast_from_fp8_ts(codes: Any, scale_inv: Any, offset: int, itype: int, otype: int) -> Any:
        return functions["cast_from_fp8"](codes, scale_inv, itype, otype, offset)

    def te_gemm_ts(*args: Any) -> Any:
        a, a_inverse, a_at, a_type, transa, b, b_inverse, b_at, b_type, *rest = args
        of_a, of_b = (
            t[int(at)] if t.numel() else t for t, at in ((a_inverse, a_at), (b_inverse, b_at))
        )
        functions["te_gemm"](a, of_a, a_type, transa, b, of_b, b_type, *rest)
        return args[10]

    def layernorm_fwd_fp8_inf_ts(*args: Any) -> Any:
        *addresses, offset, otype, sm_margin, zero_centered = args
        fwd = functions["layernorm_fwd_fp8"]
        return fwd(*addresses, otype, sm_margin, zero_centered, **same(offset))[0]

    def rmsnorm_fwd_fp8_inf_ts(*args: Any) -> Any:
        *addresses, offset, otype, sm_margin, zero_centered = args
        fwd = functions["rmsnorm_fwd_fp8"]
        return fwd(*addresses, otype, sm_margin, zero_centered, **same(offset))[0]

    script = (
        cast_to_fp8_ts,
        cast_to_fp8_noalloc_ts,
        cast_from_fp8_ts,
        te_gemm_ts,
        layernorm_fwd_fp8_inf_ts,
        rmsnorm_fwd_fp8_inf_ts,
    )
    return {
        "layernorm_fwd_inf_ts": functions["layernorm_fwd_inf"],
        "rmsnorm_fwd_inf_ts": functions["rmsnorm_fwd_inf"],
        **{f.__name__: f for f in script},
    }


def _module(name: str, names: dict[str, Any]) -> ModuleType:
    """A module with ``names``; any other name is a function that raises UnsupportedByEmulation
    when called."""

    def missing(wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(f"{name} has no {wanted}")
        return refused(wanted)

    module = ModuleType(name)
    module.__dict__.update(names, __getattr__=missing)
    return module


def _as_it_is(function: Any, *_args: Any, **_kwargs: Any) -> Any:
    # In place of torch.jit.script, whose compiler does not support current Pythons.
    return function


@contextmanager
def _found(since: v1.Version) -> Iterator[None]:
    """A context in which the package's search for its extension finds the emulation.

    transformer_engine.common determines where to search, and loads CUDA libraries. Its stand-in
    points to a generated file that imports the emulation. Its submodules are the real ones.
    """
    root = importlib.util.find_spec("transformer_engine")
    if root is None or root.submodule_search_locations is None:
        raise ImportError("transformer_engine is no package")
    with tempfile.TemporaryDirectory() as folder:
        source = f"import {__name__} as v1\nglobals().update(v1.extension_names({since!r}))\n"
        Path(folder, f"{EXTENSION}.emulated.py").write_text(source)
        common = ModuleType("transformer_engine.common")
        common.__path__ = [str(Path(at, "common")) for at in root.submodule_search_locations]
        vars(common).update(
            get_te_path=lambda: Path(folder),
            is_package_installed=lambda _package: False,
            _get_sys_extension=lambda: "py",
        )
        sys.modules["transformer_engine.common"] = common
        yield


def _stand_in_for_onnx() -> None:
    """Replace modules for ONNX export, which current torch no longer supports, by refusing ones."""
    for name in ("transformer_engine.pytorch.te_onnx_extensions", "torch.onnx._type_utils"):
        sys.modules[name] = _module(name, {})
    torch.onnx._type_utils = sys.modules["torch.onnx._type_utils"]


@contextmanager
def _flash_attn() -> Iterator[None]:
    """A context in which flash-attn seems to be installed: 1.9 to 1.11 import it even if they do
    not use it."""
    known = importlib.metadata.version

    def version(package: str) -> str:
        return _FLASH_ATTN if package == "flash-attn" else known(package)

    for name in _FLASH_ATTN_MODULES:
        sys.modules.setdefault(name, _module(name, {}))
    with mock.patch("importlib.metadata.version", version):
        yield
