"""What differs between the extensions of the releases of 2.x, by the first release that has it.

Read from TransformerEngine's repository, file by file, between the tags of the supported releases
(of 2.19, which has none there, at the commit that began 2.20). What a release's Python shows of
itself, as an attribute that a quantizer has or lacks, is looked up where it is used.

The kernels of casts, updates, norms, activations and products of 2.4 have the contract of
today's, but for what is below: what else changed in ``common/cast`` (until 2.9 in ``common/util``),
``common/recipe``, ``common/transpose``, ``common/normalization``, ``common/activation`` and
``common/gemm`` since is speed, new functions, grouped tensors, or what the emulation refuses.
"""

from __future__ import annotations

import functools
import importlib.metadata

Release = tuple[int, int]

#: ``get_fused_attn_backend`` takes one object and returns the reason too: its caller in
#: ``attention/dot_product_attention/utils.py`` of 2.19 and 2.20.
FUSED_ATTENTION_TELLS_WHY: Release = (2, 20)
#: Backwards of softmaxes do not overwrite the gradient that they get: pull request 3201,
#: ``pytorch/csrc/extensions/softmax.cpp``.
SOFTMAX_GRADIENT_HAS_ITS_MEMORY: Release = (2, 19)
#: The cast to NVFP4 may write scales in the order of the GEMM, of transformed codes and later of
#: squares: ``create_tensor`` in ``pytorch/csrc/quantizer.cpp`` of 2.17.1 and of 2.18.
TRANSFORMED_SCALES_MAY_BE_SWIZZLED: Release = (2, 17)
SQUARE_SCALES_MAY_BE_SWIZZLED: Release = (2, 18)
#: Quantised tensors that are made like others are on their device: ``make_like`` in
#: ``pytorch/quantized_tensor.py``. Before, they are on the current CUDA device, by its index.
TENSORS_KEEP_THEIR_DEVICE: Release = (2, 16)
#: Quantised storages are given the dtype that they stand for: ``fake_dtype`` in
#: ``pytorch/tensor/storage``.
STORAGES_KNOW_THEIR_DTYPE: Release = (2, 14)
#: Casts to MXFP8 multiply with the reciprocal of every scale: ``exp2f_rcp`` in
#: ``common/util/ptx.cuh``, pull request 2647. Before, they multiply with 1 for the smallest scale,
#: byte 0, and with 0 for the largest, byte 254; until 2.5 with that power of two.
RECIPROCALS_OF_ALL_MX_SCALES: Release = (2, 13)
#: Quantizers say whether scales are wanted in the order of the GEMM (``optimize_for_gemm``), and
#: tensors whether theirs are (``with_gemm_swizzled_scales``): pull request 2486,
#: ``pytorch/csrc/quantizer.cpp``. Before, every GEMM orders them on the way.
SCALES_MAY_BE_SWIZZLED: Release = (2, 12)
#: Tensors of FP8 blocks have one layout: the same pull request. Before, they were told theirs
#: (``data_format``), and a quantizer with ``all_gather_usage`` wrote another one.
BLOCKS_HAVE_ONE_LAYOUT: Release = (2, 12)
#: Gated activations write the transpose of per-tensor FP8, too: the same pull request,
#: ``common/cast/dispatch/gated.cuh``. Before, they left its memory as it was.
GATED_TRANSPOSE_IS_WRITTEN: Release = (2, 12)
#: Norms take the amax of current scaling from their rounded output: pull request 2355,
#: ``common/normalization``. Before, they take it from the fp32 values.
NORMS_ROUND_BEFORE_AMAX: Release = (2, 10)
#: On devices that multiply every layout, a per-tensor FP8 operand without row-wise data is read
#: from its transpose: ``CanonicalizeGemmInput`` in ``common/gemm/cublaslt_gemm.cu``.
TRANSPOSES_MULTIPLY_ANYWHERE: Release = (2, 10)
#: Quantised tensors take the device on which they are made: ``pytorch/quantized_tensor.py``.
TENSORS_TAKE_A_DEVICE: Release = (2, 10)
#: Rotations have start positions in the backward, too: ``fused_rope_backward`` in
#: ``pytorch/csrc/extensions/apply_rope.cpp``.
ROTATIONS_START_ANYWHERE_BACKWARD: Release = (2, 10)
#: Quantised tensors without autograd are called storages, and the module of quantised training
#: ``pytorch/quantization.py``. Before, they are called bases, and that module ``pytorch/fp8.py``.
STORAGES_ARE_CALLED_SO: Release = (2, 9)
#: Casts to FP8 blocks leave a tensor as it is where a flag asks for that, as all others do:
#: ``common/transpose/quantize_transpose_*_blockwise.cu``. Before, they ignore the flag.
BLOCKS_HEED_THE_FLAG: Release = (2, 8)
#: A quantised result that cuBLAS does not write itself is quantised from a rounded one:
#: ``unfused_quantization_needed`` in ``pytorch/csrc/extensions/gemm.cpp``. Before, cuBLAS writes
#: all.
PRODUCTS_ARE_QUANTISED_AFTERWARDS: Release = (2, 8)
#: Hopper's bias gradient beside a delayed cast without a transpose: ``with_fused_kernel`` in
#: ``pytorch/csrc/extensions/bias.cpp``. Before, the fused kernel is called, which does not have it.
BIAS_GRADIENTS_WITHOUT_TRANSPOSES: Release = (2, 8)
#: A tensor that is quantised into gets the buffers that the quantizer fills:
#: ``convert_and_update_tensor`` in ``pytorch/csrc/quantizer.cpp``. Before, the kernels fill those
#: that it has, but no transpose that is marked as invalid; and new tensors of per-tensor FP8 hold
#: 1/scale before any cast, and row-wise data only if the quantizer says so, on any device.
TENSORS_ARE_FITTED: Release = (2, 7)
#: Norms find the amax of current scaling themselves: ``create_hp_tensor_with_amax`` in the same
#: file. Before, a kernel finds it in their rounded output.
NORMS_FIND_AMAX: Release = (2, 7)
#: So do activations and their gradients: pull request 2004. They take it from their fp32 values to
#: this day (``unary_kernel``, ``unary_grad_kernel`` and those of gated activations in
#: ``common/util/vectorized_pointwise.h``).
ACTIVATIONS_FIND_AMAX: Release = (2, 7)
#: Activations quantise for any quantizer: ``pytorch/csrc/extensions/activation.cpp``. Before, those
#: for FP8 blocks fail, and gradients for current scaling use a scale that is left from before;
#: ``bgrad_quantize`` (``bias.cpp``) calls the fused kernel for any quantizer, which only
#: per-tensor FP8 and MXFP8 have.
EVERY_QUANTIZER_HAS_A_PATH: Release = (2, 7)
#: A transpose keeps the dimensions of its tensor: ``pytorch/csrc/extensions/transpose.cpp``.
#: Before, it is a matrix.
TRANSPOSES_KEEP_DIMENSIONS: Release = (2, 7)
#: The reciprocal of a scale is built from its bits (``exp2f_rcp`` in ``common/util/ptx.cuh``).
#: Before, it is computed (``common/utils.cuh``), which the largest scale has one of, too.
RECIPROCALS_ARE_BITS: Release = (2, 6)
#: Activations round to their type before they cast to MXFP8 ("Numerical truncation" in
#: ``common/util/cast_kernels.cuh`` and ``cast_gated_kernels.cuh``). Before, they do not.
MX_ACTIVATIONS_ARE_ROUNDED: Release = (2, 6)
#: ``get_fused_attn_backend`` is told first whether attention is trained.
FUSED_ATTENTION_KNOWS_OF_TRAINING: Release = (2, 5)
#: One call splits a tensor and quantises the parts (``split_quantize`` in
#: ``pytorch/csrc/extensions/cast.cpp``). Before, it gets the parts (``fused_multi_quantize`` in
#: ``transpose.cpp``).
PARTS_ARE_SPLIT_INSIDE: Release = (2, 5)
#: Tensors of FP8 blocks may be laid out for an all-gather, and are told so (``data_format``).
BLOCKS_MAY_BE_COMPACT: Release = (2, 5)
#: There is no fused attention for at most 512 tokens any more: ``NVTE_Fused_Attn_Backend`` in
#: ``common/include/transformer_engine/fused_attn.h``.
NO_ATTENTION_OF_512: Release = (2, 16)
#: The router of experts that is emulated: before, it took other arguments, chose other experts
#: among equal ones and moved negative ones elsewhere (``common/fused_router`` and
#: ``common/permutation``).
ROUTER: Release = (2, 18)
#: The scale of a block of NVFP4 is its amax times a factor of the tensor's scale and 1/6 that is
#: rounded first; in 2.12 amax / 6 is, or amax times 1/6: ``common/cast/nvfp4/core_nvfp4.cuh``, pull
#: request 2555. The emulation carries the newer one only.
NVFP4: Release = (2, 14)


def release_of(version: str) -> Release:
    """Major and minor number."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def installed_release() -> Release:
    """Of the library that this process imports."""
    return release_of(importlib.metadata.version("transformer_engine"))
