"""What Triton's interpreter computes otherwise than a GPU, replaced."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl

from triton_on_cpu import arithmetic as of
from triton_on_cpu.casts import TORCH, as_fp32, converted, is_stored

#: Inline assembly that kernels use, by a part of its text -> what it computes of its first operand.
ASSEMBLY = {"cvt.rp.satfinite.ue8m0x2.f32": of.e8m0_up}
#: numpy's functions by the name that the interpreter gives them, and what takes their place.
_IN_FP64 = (np.exp, np.exp2, np.log, np.log2, np.sin, np.cos)
_FLUSHING = (np.floor, np.ceil)


def repair(interpreter: Any) -> None:
    """Patch the interpreter's builder and its reductions."""
    handle, numpy_type = interpreter.TensorHandle, interpreter._get_np_dtype
    builder = interpreter.InterpreterBuilder
    binary, unary, cast = builder.binary_op, builder.unary_op, builder.cast_impl
    to_fp, to_zero = builder.create_fp_to_fp, interpreter._ir.ROUNDING_MODE.RTZ

    def made(x: Any, dtype: Any) -> Any:
        return handle(of.narrow(np.asarray(x), dtype), dtype)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        dtype = lhs.dtype.scalar
        if not is_stored(dtype):
            found = binary(self, lhs, rhs, op)
            return handle(of.one_nan(found.data), found.dtype)
        found = op(of.wide(lhs.data, dtype), of.wide(rhs.data, dtype))
        return handle(found, tl.int1) if found.dtype == np.bool_ else made(found, dtype)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        dtype = arg.dtype.scalar
        if not is_stored(dtype):
            if op in _IN_FP64:
                function = of.exactly(op)
            else:
                function = (lambda x: op(of.flushed(x))) if op in _FLUSHING else op
            return unary(self, arg, lambda x: of.one_nan(np.asarray(function(x))))
        return made(op(of.wide(arg.data, dtype)), dtype)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source in TORCH and target in TORCH:
            return handle(converted(src.data, source, target), target)
        if is_stored(source):
            return cast(self, handle(as_fp32(src.data, source), tl.float32), dst_type)
        if is_stored(target):
            return made(src.data.astype(np.float32), target)
        return cast(self, src, dst_type)

    def to_whole(self: Any, src: Any, dst_type: Any) -> Any:
        """``cvt.rzi`` saturates, and NaN is 0."""
        x = np.asarray(of.wide(src.data, src.dtype.scalar), dtype=np.float64)
        target = numpy_type(dst_type.scalar)
        ends = np.iinfo(target)
        inside = np.clip(np.nan_to_num(np.trunc(x), nan=0.0, posinf=2.0**70, neginf=-(2.0**70)),
                         float(ends.min), float(ends.max))  # fmt: skip
        most = inside >= float(ends.max)
        whole = np.where(most, 0.0, inside).astype(target)
        return handle(np.where(most, ends.max, whole).astype(target), dst_type.scalar)

    def fp_to_fp(self: Any, src: Any, dst_type: Any, mode: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source not in TORCH or target not in TORCH:
            return to_fp(self, src, dst_type, mode)
        return handle(converted(src.data, source, target, to_zero=mode == to_zero), target)

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        return handle(of.product(a.data, a.dtype, b.data, b.dtype, d.data), d.dtype.scalar)

    def clampf(self: Any, x: Any, least: Any, most: Any, nans: Any) -> Any:
        dtype = x.dtype.scalar
        args = (of.wide(t.data, dtype) for t in (x, least, most))
        found = of.clamped(*args, propagates="ALL" in str(nans)).astype(_kept(x))
        return made(of.one_nan(found), dtype)

    def _kept(x: Any) -> Any:
        return np.float32 if is_stored(x.dtype.scalar) else x.data.dtype

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        dtype = z.dtype.scalar
        args = [of.wide(t.data, dtype) for t in (x, y, z)]
        if dtype == tl.float32:
            return handle(of.one_nan(of.fused_fp32(*args)), dtype)
        if dtype == tl.float16:
            return handle(of.one_nan(of.fused(*args).astype(np.float16)), dtype)
        if is_stored(dtype):
            return made(of.fused(*args), dtype)
        return handle(args[0] * args[1] + args[2], dtype)

    def inline_asm(
        self: Any, text: str, constraints: Any, values: Any, kind: Any, pure: Any, pack: Any
    ) -> Any:
        kinds = kind if isinstance(kind, (list, tuple)) else [kind]
        for part, function in ASSEMBLY.items():
            if part in text and len(kinds) == 1:
                found = function(of.wide(values[0].data, values[0].dtype.scalar))
                return _Results(handle(found.astype(numpy_type(kinds[0])), kinds[0].scalar))
        raise NotImplementedError(f"the interpreter does not know this assembly: {text.strip()}")

    builder.binary_op, builder.unary_op, builder.cast_impl = binary_op, unary_op, cast_impl
    builder.create_fp_to_fp, builder.create_dot, builder.create_fma = fp_to_fp, dot, fma
    builder.create_fp_to_si = builder.create_fp_to_ui = to_whole
    builder.create_clampf, builder.create_inline_asm = clampf, inline_asm
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, of.smaller)
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, of.larger)
    builder.create_minimumf = lambda self, a, b: self.binary_op(a, b, of.smaller_or_nan)
    builder.create_maximumf = lambda self, a, b: self.binary_op(a, b, of.larger_or_nan)
    builder.create_sqrt = lambda self, a: self.unary_op(a, lambda x: np.sqrt(of.flushed(x)))
    builder.create_rsqrt = lambda self, a: self.unary_op(a, _rsqrt)
    builder.create_erf = lambda self, a: self.unary_op(a, lambda x: of.erf(of.flushed(x)))
    _promote(interpreter)
    _count(interpreter)


def _rsqrt(x: of.Numbers) -> of.Numbers:
    return of.exactly(lambda wide: 1.0 / np.sqrt(wide))(of.flushed(x))


class _Results:
    """What inline assembly gives: here it is always one."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def get_result(self, index: int) -> Any:
        return self.handle


def _count(interpreter: Any) -> None:
    """A tensor of one number bounds a loop: numpy 2.4 makes no int of an array with a dimension,
    and the interpreter's have one."""
    usual = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        usual(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))

    interpreter._patch_lang_tensor = patch


def _promote(interpreter: Any) -> None:
    """Reductions and scans of bf16 take it for fp32, as Triton's own ``tl.sum``, ``tl.max`` and
    ``tl.cumsum`` do where they are compiled."""

    def promoted(self: Any, x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return self.to_tensor(as_fp32(x.handle.data, tl.bfloat16), tl.float32)

    def min_max(self: Any, given: Any, value: Any, index: Any = None) -> Any:
        """numpy's ``nanmax`` takes a signalling NaN for one, and loses what came before it."""
        x = given[0] if isinstance(given, tuple) else given
        function = {np.nanmax: of.largest_of, np.nanmin: of.smallest_of}.get(value)
        if function is None or not np.issubdtype(x.handle.data.dtype, np.floating):
            return usual_min_max(self, given, value, index)
        found = function(x.handle.data, self.axis, keepdims=self.keep_dims)
        return self.to_tensor(of.one_nan(found), x.dtype)

    usual_min_max = interpreter.ReduceOps.min_max
    interpreter.ReduceOps.min_max = lambda self, given, val_reduce_op, idx_reduce_op=None: min_max(
        self, given, val_reduce_op, idx_reduce_op
    )
    for kind in (interpreter.ReduceOps, interpreter.ScanOps):
        usual = kind.apply_impl

        def apply_impl(self: Any, given: Any, usual: Any = usual) -> Any:
            return usual(self, tuple(promoted(self, x) for x in given))

        kind.apply_impl = apply_impl
