"""TransformerEngine 2.x on the CPU: put the emulated extension in place and import the library.

Supported, with delayed, current, MXFP8, FP8 block and NVFP4 scaling: Linear, LayerNormLinear,
LayerNormMLP, GroupedLinear without grouped tensors, TransformerLayer with attention that is not
fused, their recomputation, cached weights and quantised parameters; the router of experts, its
auxiliary loss, and the movement of tokens by an index map.
Every other function of the extension raises UnsupportedByEmulation with its name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from te_on_cpu import (
    cuda_names,
    v2_activation,
    v2_attention,
    v2_experts,
    v2_gemm,
    v2_grouped,
    v2_norm,
    v2_quantize,
    v2_router,
    v2_tensors,
)
from te_on_cpu.v2_names import NAME, extension, refusing_module
from te_on_cpu.v2_releases import (
    FUSED_ATTENTION_KNOWS_OF_TRAINING,
    FUSED_ATTENTION_TELLS_WHY,
    PARTS_ARE_SPLIT_INSIDE,
    ROTATIONS_START_ANYWHERE_BACKWARD,
    SOFTMAX_GRADIENT_HAS_ITS_MEMORY,
    STORAGES_ARE_CALLED_SO,
    TENSORS_KEEP_THEIR_DEVICE,
    Release,
    release_of,
)

#: The emulated functions of the newest release, by name.
FUNCTIONS = v2_activation.functions() | {
    function.__name__: function
    for function in (
        v2_quantize.quantize,
        v2_quantize.dequantize,
        v2_quantize.bgrad_quantize,
        v2_quantize.fp8_transpose,
        v2_quantize.compute_amax,
        v2_quantize.swizzle_scales_for_gemm_,
        v2_tensors.create_empty_quantized_tensor,
        v2_gemm.generic_gemm,
        v2_quantize.fused_amax_and_scale_update_after_reduction,
        v2_norm.layernorm_fwd,
        v2_norm.layernorm_bwd,
        v2_norm.rmsnorm_fwd,
        v2_norm.rmsnorm_bwd,
        v2_grouped.split_quantize,
        v2_grouped.te_general_grouped_gemm,
        v2_attention.scaled_softmax_forward,
        v2_attention.scaled_masked_softmax_forward,
        v2_attention.fused_rope_forward,
        v2_attention.fused_rope_backward,
        v2_router.fused_topk_with_score_function_fwd,
        v2_router.fused_topk_with_score_function_bwd,
        v2_router.fused_score_for_moe_aux_loss_fwd,
        v2_router.fused_score_for_moe_aux_loss_bwd,
        v2_router.fused_moe_aux_loss_fwd,
        v2_router.fused_moe_aux_loss_fwd_graph_safe,
        v2_router.fused_moe_aux_loss_bwd,
        v2_experts.moe_permute_fwd,
        v2_experts.moe_unpermute_fwd,
        v2_experts.moe_unpermute_bwd,
    )
}
# the gradient of a token's row is the sum of its rows' gradients
FUNCTIONS["moe_permute_bwd"] = v2_experts.moe_unpermute_fwd


def functions(release: Release) -> dict[str, Callable[..., Any]]:
    """The emulated functions of a release, by name."""
    softmax_backward = (
        v2_attention.scaled_softmax_backward
        if release >= SOFTMAX_GRADIENT_HAS_ITS_MEMORY
        else v2_attention.scaled_softmax_backward_in_place
    )
    both = ("scaled_softmax_backward", "scaled_masked_softmax_backward")
    found = FUNCTIONS | dict.fromkeys(both, softmax_backward)
    if release < ROTATIONS_START_ANYWHERE_BACKWARD:
        found["fused_rope_backward"] = v2_attention.fused_rope_backward_from_the_start
    if release < PARTS_ARE_SPLIT_INSIDE:
        del found["split_quantize"]
        found["fused_multi_quantize"] = v2_grouped.fused_multi_quantize
    return found


def _backend(release: Release) -> Callable[..., Any]:
    """``get_fused_attn_backend`` of a release, whose first argument is the extension."""
    if release >= FUSED_ATTENTION_TELLS_WHY:
        return v2_attention.get_fused_attn_backend
    if release >= FUSED_ATTENTION_KNOWS_OF_TRAINING:
        return v2_attention.get_fused_attn_backend_of_arguments
    return v2_attention.get_fused_attn_backend_without_training


#: Constants that the extension reports. cuBLAS 12.9 is older than the library's grouped-tensor
#: kernels require, which are not emulated.
VERSIONS = {
    "get_cudnn_version": 91200,
    "get_cublasLt_version": 120900,
    "get_num_cublas_streams": 4,
    "device_supports_multicast": 0,
    "ubuf_built_with_mpi": 0,
    "nvte_built_with_cublasmp": 0,
}

_TRITON = "transformer_engine.pytorch.triton"

#: Modules of the library that import onnxscript or triton; their functions are refused when called,
#: unless Triton is imported already and interprets its kernels.
_NOT_IMPORTABLE = (
    "transformer_engine.pytorch.onnx_extensions",
    _TRITON,
    *(f"{_TRITON}.{name}" for name in ("cross_entropy", "grouped_dbias_dscales", "mhc")),
    *(f"{_TRITON}.{name}" for name in ("pad", "permutation")),
)


def refused_modules() -> list[str]:
    """The modules that are replaced by refusing ones: those of Triton's kernels only where its
    interpreter does not run them. (Without it, an imported Triton compiles for a GPU.)"""
    interpreted = "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1"
    return [name for name in _NOT_IMPORTABLE if not (interpreted and _TRITON in name)]


def install_v2(version: str) -> None:
    """Import ``transformer_engine.pytorch`` of ``version`` (2.x) with the emulated extension.

    The process must already name a CUDA device on the CPU (torch.cuda.is_available() and friends
    answer), and the library's Python package must be importable. The device's compute capability
    decides how the library treats FP8: with 9.0 it stores transposes as on Hopper, with 10.0 it
    does not; MXFP8 is allowed on both, though no real Hopper has it. Raises ValueError if the
    library is imported already or another version is found.
    """
    if NAME in sys.modules or "transformer_engine.pytorch" in sys.modules:
        raise ValueError("transformer_engine is imported already; install in a fresh process")
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    os.environ["NVTE_TORCH_COMPILE"] = "0"
    release = release_of(version)
    sys.modules[NAME] = module = extension(functions(release), VERSIONS, release)
    module.__dict__["get_fused_attn_backend"] = functools.partial(_backend(release), module)
    if release < PARTS_ARE_SPLIT_INSIDE:  # then a constant, and a function since
        module.__dict__["_num_cublas_streams"] = VERSIONS["get_num_cublas_streams"]
    if release < TENSORS_KEEP_THEIR_DEVICE:
        cuda_names.patch_subclasses()
    sys.modules.update({name: refusing_module(name) for name in refused_modules()})
    _import_without_loading()
    import transformer_engine
    import transformer_engine.pytorch

    if transformer_engine.__version__ != version:
        raise ValueError(
            f"found TransformerEngine {transformer_engine.__version__}, wanted {version}; "
            "install that version in an environment of its own"
        )
    place = "quantization" if release >= STORAGES_ARE_CALLED_SO else "fp8"
    _answer_for_recipes(sys.modules[f"transformer_engine.pytorch.{place}"])


def _import_without_loading() -> None:
    """Import the package with its loader of shared objects replaced before anything calls it.

    The package's ``__init__`` imports ``common``, which has the loader, and ``pytorch``, which
    calls it, in one go; so ``common`` comes first, under a package that is not executed yet.
    """
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.loader is None:
        raise ValueError("transformer_engine is not importable; install its Python package")
    package = importlib.util.module_from_spec(spec)
    sys.modules["transformer_engine"] = package
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]
    spec.loader.exec_module(package)


def _answer_for_recipes(quantization: ModuleType) -> None:
    """Make scaling by blocks available on any device and without CUDA. From 2.15 on the library
    keeps its answers in variables, before in the cache of functions."""
    for support in ("mxfp8", "fp8_block_scaling", "nvfp4"):
        if hasattr(quantization, f"_{support.upper()}_SUPPORT"):
            setattr(quantization, f"_{support.upper()}_SUPPORT", (True, ""))
        elif hasattr(quantization, f"check_{support}_support"):
            setattr(quantization, f"check_{support}_support", lambda: (True, ""))
