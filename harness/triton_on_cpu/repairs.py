"""Replacements of the operations that Triton's interpreter computes differently from a GPU. Import
this module only after Triton is set to interpret."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from triton_on_cpu import arithmetic
from triton_on_cpu.casts import TORCH, as_fp32, converted, is_stored
from triton_on_cpu.memory import LAUNCH

_Builder: Any = interpreter.InterpreterBuilder
_Handle: Any = interpreter.TensorHandle
_numpy_type: Any = interpreter._get_np_dtype
_TO_ZERO: Any = interpreter._ir.ROUNDING_MODE.RTZ
# the functions that are replaced, as released
_binary_op, _unary_op, _cast_impl = _Builder.binary_op, _Builder.unary_op, _Builder.cast_impl
_create_fp_to_fp, _patch_lang_tensor = _Builder.create_fp_to_fp, interpreter._patch_lang_tensor
_masked_load, _masked_store = _Builder.create_masked_load, _Builder.create_masked_store
_min_max: Any = interpreter.ReduceOps.min_max

#: Part of the text of inline assembly that kernels use -> the function that computes its result.
ASSEMBLY: dict[str, Callable[..., Any]] = {
    "cvt.rp.satfinite.ue8m0x2.f32": arithmetic.e8m0_up,
    "cvt.rn.satfinite.e2m1x2.f32": arithmetic.e2m1_nearest,
    "cvt.rs.satfinite.e2m1x4.f32": arithmetic.e2m1_by_chance,
}
#: numpy's functions that are not rounded correctly in fp32; those whose GPU versions take subnormal
#: operands for zero; and those that return zero for a subnormal result (``ex2.approx.ftz``).
_IN_FP64 = (np.exp, np.exp2, np.log, np.log2, np.sin, np.cos)
_FLUSHING = (np.floor, np.ceil)
_FLUSHED = (np.exp2,)


#: Atomic operations.
_WRITING = ("create_atomic_cas", "create_atomic_rmw")


def repair() -> None:
    """Patch the interpreter's builder, its reductions and its tensors."""
    replaced = {
        "binary_op": binary_op,
        "unary_op": unary_op,
        "cast_impl": cast_impl,
        "create_fp_to_fp": fp_to_fp,
        "create_fp_to_si": to_whole,
        "create_fp_to_ui": to_whole,
        "create_dot": dot,
        "create_fma": fma,
        "create_clampf": clampf,
        "create_inline_asm": inline_asm,
        "create_masked_load": masked_load,
        "create_masked_store": masked_store,
        "create_minnumf": lambda self, a, b: self.binary_op(a, b, arithmetic.smaller),
        "create_maxnumf": lambda self, a, b: self.binary_op(a, b, arithmetic.larger),
        "create_minimumf": lambda self, a, b: self.binary_op(a, b, arithmetic.smaller_or_nan),
        "create_maximumf": lambda self, a, b: self.binary_op(a, b, arithmetic.larger_or_nan),
        "create_sqrt": lambda self, a: self.unary_op(a, arithmetic.sqrt),
        "create_rsqrt": lambda self, a: self.unary_op(a, arithmetic.rsqrt),
        "create_erf": lambda self, a: self.unary_op(a, arithmetic.erf),
    }
    for name, function in replaced.items():
        setattr(_Builder, name, function)
    for name in _WRITING:
        setattr(_Builder, name, writing(getattr(_Builder, name)))
    interpreter.ReduceOps.min_max = min_max
    for kind in (interpreter.ReduceOps, interpreter.ScanOps):
        kind.apply_impl = promoting(kind.apply_impl)
    interpreter._patch_lang_tensor = patch_lang_tensor


def _made(x: Any, dtype: Any) -> Any:
    """A handle of ``x``, rounded to ``dtype`` once."""
    return _Handle(arithmetic.to_storage(np.asarray(x), dtype), dtype)


def _to_numpy(*handles: Any) -> list[arithmetic.Numbers]:
    """The data of handles of one dtype as arrays with which numpy can compute."""
    return [arithmetic.to_numpy(handle.data, handles[0].dtype.scalar) for handle in handles]


def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    dtype = lhs.dtype.scalar
    if not is_stored(dtype):
        found = _binary_op(self, lhs, rhs, op)
        return _Handle(arithmetic.one_nan(found.data), found.dtype)
    found = op(*_to_numpy(lhs, rhs))
    return _Handle(found, tl.int1) if found.dtype == np.bool_ else _made(found, dtype)


def unary_op(self: Any, arg: Any, op: Any) -> Any:
    dtype = arg.dtype.scalar
    if is_stored(dtype):
        return _made(op(*_to_numpy(arg)), dtype)
    function = op
    if op in _IN_FP64:
        function = arithmetic.in_fp64(op)
    elif op in _FLUSHING:
        function = arithmetic.with_flushed_input(op)
    finish = arithmetic.flushed if op in _FLUSHED else np.asarray
    return _unary_op(self, arg, lambda x: arithmetic.one_nan(finish(function(x))))


def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
    source, target = src.dtype.scalar, dst_type.scalar
    if source in TORCH and target in TORCH:
        return _Handle(converted(src.data, source, target), target)
    if is_stored(source):
        return _cast_impl(self, _Handle(as_fp32(src.data, source), tl.float32), dst_type)
    if is_stored(target):
        return _made(src.data.astype(np.float32), target)
    return _cast_impl(self, src, dst_type)


def fp_to_fp(self: Any, src: Any, dst_type: Any, mode: Any) -> Any:
    source, target = src.dtype.scalar, dst_type.scalar
    if source not in TORCH or target not in TORCH:
        return _create_fp_to_fp(self, src, dst_type, mode)
    return _Handle(converted(src.data, source, target, to_zero=mode == _TO_ZERO), target)


def to_whole(self: Any, src: Any, dst_type: Any) -> Any:
    (x,), target = _to_numpy(src), dst_type.scalar
    return _Handle(arithmetic.whole(x, _numpy_type(target)), target)


def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    return _Handle(arithmetic.product(a.data, a.dtype, b.data, b.dtype, d.data), d.dtype.scalar)


def clampf(self: Any, x: Any, least: Any, most: Any, nans: Any) -> Any:
    found = arithmetic.clamped(*_to_numpy(x, least, most), propagates="ALL" in str(nans))
    return _made(arithmetic.one_nan(found), x.dtype.scalar)


def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    dtype, args = z.dtype.scalar, _to_numpy(x, y, z)
    if dtype == tl.float32:
        return _Handle(arithmetic.one_nan(arithmetic.fused_fp32(*args)), dtype)
    if dtype == tl.float16:
        return _Handle(arithmetic.one_nan(arithmetic.fused(*args).astype(np.float16)), dtype)
    if is_stored(dtype):
        return _made(arithmetic.fused(*args), dtype)
    return _Handle(args[0] * args[1] + args[2], dtype)


def inline_asm(
    self: Any, text: str, constraints: Any, values: Any, kind: Any, pure: Any, pack: Any
) -> Any:
    """Raises NotImplementedError with the text of assembly that is not in ``ASSEMBLY``."""
    kinds = kind if isinstance(kind, list | tuple) else [kind]
    for part, function in ASSEMBLY.items():
        if part in text and len(kinds) == 1:
            found = function(
                *(arithmetic.to_numpy(value.data, value.dtype.scalar) for value in values)
            )
            return _Results(_Handle(found.astype(_numpy_type(kinds[0])), kinds[0].scalar))
    raise NotImplementedError(f"the interpreter does not know this assembly: {text.strip()}")


class _Results:
    """The results of inline assembly; here there is always one."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def get_result(self, index: int) -> Any:
        return self.handle


def min_max(self: Any, given: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
    """``tl.min`` and ``tl.max``. numpy's ``nanmax`` returns a signalling NaN if it meets one, and
    so loses earlier elements."""
    x = given[0] if isinstance(given, tuple) else given
    function = {np.nanmax: arithmetic.largest_of, np.nanmin: arithmetic.smallest_of}.get(
        val_reduce_op
    )
    if function is None or not np.issubdtype(x.handle.data.dtype, np.floating):
        return _min_max(self, given, val_reduce_op, idx_reduce_op)
    found = function(x.handle.data, self.axis, keepdims=self.keep_dims)
    return self.to_tensor(arithmetic.one_nan(found), x.dtype)


def promoting(usual: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction or scan that converts bf16 to fp32 first, as Triton's own ``tl.sum``, ``tl.max``
    and ``tl.cumsum`` do when they are compiled."""

    def promoted(self: Any, x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return self.to_tensor(as_fp32(x.handle.data, tl.bfloat16), tl.float32)

    def apply_impl(self: Any, given: Any) -> Any:
        return usual(self, tuple(promoted(self, x) for x in given))

    return apply_impl


def masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *how: Any, **named: Any) -> Any:
    """A load in which elements outside of the launch's arguments are NaN (all bits set)."""
    element = ptrs.get_element_ty()
    found = LAUNCH.outside(ptrs.data, mask.data, np.dtype(_numpy_type(element)).itemsize)
    if found is None:
        return _masked_load(self, ptrs, mask, other, *how, **named)
    beyond, _ = found
    inside = _Handle(np.asarray(mask.data, dtype=bool) & ~beyond, tl.int1)
    within = _masked_load(self, ptrs, inside, other, *how, **named)
    within.data[beyond] = np.full(1, -1, f"i{within.data.dtype.itemsize}").view(within.data.dtype)
    return within


def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *how: Any, **named: Any) -> Any:
    """A store that raises OutsideError before it writes outside of the launch's arguments, and
    WrittenTwiceError if another program or lane writes a different value to an address."""
    element = ptrs.get_element_ty()
    size = np.dtype(_numpy_type(element)).itemsize
    LAUNCH.check_written(ptrs.data, mask.data, size)
    if not LAUNCH.arguments:
        return _masked_store(self, ptrs, value, mask, *how, **named)
    program = 1 + int(np.ravel_multi_index(self.grid_idx, self.grid_dim))
    lanes = np.broadcast_to(np.asarray(mask.data, dtype=bool), ptrs.data.shape)

    def other(where: Any) -> Any:
        """A mask of the addresses in ``where`` that hold another value than ``value`` now."""
        there = _masked_load(self, ptrs, _Handle(where, tl.int1), None, None, None, False)
        given = np.ascontiguousarray(np.broadcast_to(value.data, there.data.shape))
        whole = f"u{size}"
        return where & (np.ascontiguousarray(there.data).view(whole) != given.view(whole))

    lost = LAUNCH.claim(ptrs.data, lanes, program)
    if lost.any():
        lost = other(lost)
    if not lost.any():
        _masked_store(self, ptrs, value, mask, *how, **named)
        lost = other(lanes)
    if lost.any():
        raise LAUNCH.written_twice_error(ptrs.data, lost)
    return None


def writing(usual: Callable[..., Any]) -> Callable[..., Any]:
    """An atomic operation that raises OutsideError before it writes outside of the launch's
    arguments."""
    names = list(inspect.signature(usual).parameters)

    def written(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        pointers = given["ptr" if "ptr" in given else "ptrs"]
        mask = given["mask"].data if "mask" in given else True
        size = np.dtype(_numpy_type(pointers.get_element_ty())).itemsize
        LAUNCH.check_written(pointers.data, mask, size)
        return usual(*args, **kwargs)

    return written


def patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Let a tensor of one element be the bound of a loop: numpy 2.4 does not convert an array with
    a dimension to int, and the interpreter's arrays have one."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))
