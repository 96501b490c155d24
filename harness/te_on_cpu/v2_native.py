"""Events of TransformerEngine's own 2.x extension on a GPU, for listeners of ``watch``.

Quantising calls and GEMMs are reported like those of the emulated kernels, from the tensors that
they return. Casts inside kernels that compute their own input (norms, activations, a product's
output) are not reported, as that input is never stored. Neither are casts by blocks, whose scales
may be in the order that the GEMM needs; their products are reported without scales.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from te_on_cpu.v2_fp4 import codes_in, parts_of
from te_on_cpu.v2_names import NAME
from te_on_cpu.v2_scales import current_scale, largest
from te_on_cpu.v2_tensors import logical_shape
from te_on_cpu.v2_types import (
    flat_shape,
    fp8_format,
    is_blockwise,
    is_float8,
    is_mxfp8,
    is_nvfp4,
    is_quantised,
    kind,
)
from te_on_cpu.watch import Cast, Multiply, Operand, Seen, Update

#: Formats of operands that are not quantised.
_PLAIN = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}


@contextmanager
def listening_to_extension(listener: Callable[[Seen], None]) -> Iterator[None]:
    """A context in which ``listener`` is called with the events of ``transformer_engine_torch``."""
    extension = importlib.import_module(NAME)
    with ExitStack() as stack:
        for name in (*_BEFORE, *_AFTER):
            if function := getattr(extension, name, None):  # 1.x does not have all of them
                new = _telling(name, function, listener)
                stack.enter_context(patch.object(extension, name, new))
        yield


def _telling(
    name: str, function: Callable[..., Any], listener: Callable[[Seen], None]
) -> Callable[..., Any]:
    before, after = _BEFORE.get(name), _AFTER.get(name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            listener(before(*args, **kwargs))
        result = function(*args, **kwargs)
        if after is not None:
            for seen in after(result, *args, **kwargs):
                listener(seen)
        return result

    return call


def _quantize(
    made: Any, tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None
) -> Iterator[Seen]:
    if noop is None or float(noop) != 1.0:
        yield from _casts(tensor, quantizer, made)


def _bgrad_quantize(made: list[Any], input: Tensor, quantizer: Any) -> Iterator[Seen]:
    yield from _casts(input, quantizer, made[1])


def _split_quantize(
    made: list[Any], tensor: Tensor, split_sections: list[int], quantizer_list: list[Any], **_: Any
) -> Iterator[Seen]:
    parts = tensor[: sum(split_sections)].split(split_sections)
    for part, quantizer, one in zip(parts, quantizer_list, made, strict=True):
        yield from _casts(part, quantizer, one)


def _fused_multi_quantize(
    made: list[Any], input_list: list[Tensor], _: Any, quantizer_list: list[Any], __: Any
) -> Iterator[Seen]:
    for part, quantizer, one in zip(input_list, quantizer_list, made, strict=True):
        yield from _casts(part, quantizer, one)


def _casts(values: Tensor, quantizer: Any, made: Any) -> Iterator[Cast]:
    if not is_float8(made) or not values.numel():
        return
    values, fmt = values.detach(), fp8_format(made._fp8_dtype)
    if kind(quantizer) == "delayed":
        scale, amax = quantizer.scale.detach().reshape(1).clone(), quantizer.amax.detach()
    else:
        scale, amax = _scale_of(made._scale_inv, quantizer, values), None
    yield Cast(values, _codes(made).view(values.shape), scale, amax, fmt)


def _scale_of(inverse: Tensor, quantizer: Any, values: Tensor) -> Tensor:
    """The scale that belongs to ``inverse``: the one by definition if its reciprocal is
    ``inverse``, otherwise 1 / ``inverse``. Only the inverse is stored, and several scales may have
    the same inverse."""
    right = current_scale(
        largest(values).to(values.device),
        fp8_format(quantizer.dtype),
        power_of_two=quantizer.force_pow_2_scales,
        epsilon=quantizer.amax_epsilon,
    )
    return torch.where(right.reciprocal() == inverse, right, inverse.reciprocal())


def _codes(tensor: Any) -> Tensor:
    """uint8 codes as a matrix, from whichever copy exists."""
    rows, columns = flat_shape(logical_shape(tensor))
    if tensor._data is not None:
        return tensor._data.detach().view(rows, columns)
    return tensor._transpose.detach().view(columns, rows).t().contiguous()


def _generic_gemm(
    made: list[Any], A: Any, transA: bool, B: Any, transB: bool, *_: Any, **__: Any
) -> Iterator[Seen]:
    yield _multiply(A, transA, B, transB, made[0])


def _grouped_gemm(
    made: Any, A: list[Any], transA: bool, B: list[Any], transB: bool, D: Any, *rest: Any
) -> Iterator[Seen]:
    for i, (a, b) in enumerate(zip(A, B, strict=True)):
        if _values(a) and _values(b):
            yield _multiply(a, transA, b, transB, D[min(i, len(D) - 1)])


def _values(tensor: Any) -> int:
    shape = logical_shape(tensor) if is_quantised(tensor) else tensor.shape
    return int(torch.Size(shape).numel())


def _multiply(a: Any, trans_a: bool, b: Any, trans_b: bool, result: Any) -> Multiply:
    layout: Any = ("T" if trans_a else "N") + ("T" if trans_b else "N")
    return Multiply(layout, _operand(a), _operand(b), result)


def _operand(tensor: Any) -> Operand:
    if is_float8(tensor):
        return Operand(_codes(tensor), tensor._scale_inv.detach(), fp8_format(tensor._fp8_dtype))
    if is_mxfp8(tensor):
        side = "columnwise" if tensor._rowwise_data is None else "rowwise"
        data = getattr(tensor, f"_{side}_data")
        return Operand(data.detach(), None, fp8_format(tensor._fp8_dtype))
    if is_blockwise(tensor):
        rows, columns = flat_shape(logical_shape(tensor))
        if tensor._rowwise_data is None:
            codes = tensor._columnwise_data.detach().view(columns, rows).t()
        else:
            codes = tensor._rowwise_data.detach().view(rows, columns)
        return Operand(codes, None, fp8_format(tensor._fp8_dtype))
    if is_nvfp4(tensor):
        turned = tensor._rowwise_data is None
        data, _, _ = parts_of(tensor, "columnwise" if turned else "rowwise")
        codes = codes_in(data.detach())
        return Operand(codes.t() if turned else codes, None, "e2m1")
    matrix = tensor.detach()
    return Operand(matrix.reshape(flat_shape(matrix.shape)), None, _PLAIN[matrix.dtype])


def _update(
    amax_reduction_buffer: Tensor, amax_histories: list[Tensor], scales: list[Tensor], *_: Any
) -> Update:
    return Update(tuple(amax_histories), tuple(scales))


#: Calls that are reported before they run, as they update their tensors in place.
_BEFORE: dict[str, Callable[..., Seen]] = {"fused_amax_and_scale_update_after_reduction": _update}
#: Calls that are reported after they run, from their results.
_AFTER: dict[str, Callable[..., Iterator[Seen]]] = {
    "quantize": _quantize,
    "bgrad_quantize": _bgrad_quantize,
    "split_quantize": _split_quantize,
    "fused_multi_quantize": _fused_multi_quantize,
    "generic_gemm": _generic_gemm,
    "te_general_grouped_gemm": _grouped_gemm,
}
