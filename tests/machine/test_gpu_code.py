"""What Triton makes of arithmetic for a Hopper GPU, read from its PTX: compiled here, run nowhere.

Facts that docs/unrun.md draws conclusions from, pinned for the Triton that torch brings along. The
CPU builds of torch bring none: `make versions TORCH=2.11.0` runs this.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="needs Triton, which CPU builds of torch lack")

import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from torch._inductor import config  # noqa: E402
from torch._inductor.codegen.triton import TritonOverrides  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
SIZE = 128


@triton.jit
def reciprocal(x, y, n, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(y + at, 1.0 / tl.load(x + at, at < n), at < n)


@triton.jit
def quotient(x, y, n, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(y + at, 448.0 / tl.load(x + at, at < n), at < n)


@triton.jit
def rounded_reciprocal(x, y, n, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    one = tl.full((size,), 1.0, tl.float32)
    tl.store(y + at, tl.div_rn(one, tl.load(x + at, at < n)), at < n)


@triton.jit
def product_and_sum(x, y, n, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    value = tl.load(x + at, at < n)
    tl.store(y + at, value * value, at < n)
    tl.store(y + at + n, value + value, at < n)


@triton.jit
def exp2(x, y, n, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(y + at, libdevice.exp2(tl.load(x + at, at < n)), at < n)


@triton.jit
def log2(x, y, n, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(y + at, libdevice.log2(tl.load(x + at, at < n)), at < n)


@triton.jit
def rsqrt(x, y, n, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(y + at, libdevice.rsqrt(tl.load(x + at, at < n)), at < n)


@triton.jit
def cast(x, y, n, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(y + at, tl.load(x + at, at < n).to(tl.float8e4nv), at < n)


def instructions(kernel: Any, to: str = "fp32", **options: Any) -> set[str]:
    """The floating-point instructions of a kernel's PTX."""
    signature = {"x": "*fp32", "y": f"*{to}", "n": "i32", "size": "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constexprs={"size": SIZE})
    ptx = triton.compile(source, target=HOPPER, options=options).asm["ptx"]
    return set(re.findall(r"^\s*([a-z]\w*\.(?:\w+\.)*f32(?:\.\w+)*)\s", ptx, re.M))


def flushes(found: set[str]) -> bool:
    return any(".ftz" in name for name in found)


@pytest.mark.parametrize("kernel", [reciprocal, quotient], ids=lambda k: k.__name__)
def test_a_division_is_approximate(kernel: Any) -> None:
    """div.full.f32: up to 2 ulp off, by the PTX ISA."""
    assert instructions(kernel) == {"div.full.f32"}


def test_a_division_that_asks_for_it_is_rounded_to_nearest() -> None:
    assert instructions(rounded_reciprocal) == {"div.rn.f32"}


def test_products_and_sums_keep_subnormals() -> None:
    assert instructions(product_and_sum) == {"mul.f32", "add.f32"}


@pytest.mark.parametrize("kernel", [exp2, log2, rsqrt], ids=lambda k: k.__name__)
def test_functions_of_libdevice_flush_subnormals(kernel: Any) -> None:
    assert flushes(instructions(kernel))
    assert not flushes(instructions(kernel, enable_reflect_ftz=False))


def test_a_cast_to_e4m3_saturates() -> None:
    """Where torch 2.11's own cast makes NaN of what is past 448."""
    assert instructions(cast, "fp8e4nv") == {"cvt.rn.satfinite.e4m3x2.f32"}


@pytest.mark.parametrize(
    ("switch", "code"), [(False, "(x / y)"), (True, "triton.language.div_rn(x, y)")], ids=str
)
def test_inductor_divides_exactly_only_if_told(switch: bool, code: str) -> None:
    class Value(str):
        dtype = torch.float32

    with config.patch({"eager_numerics.division_rounding": switch}):
        assert str(TritonOverrides.truediv(Value("x"), Value("y"))) == code


def test_the_switches_of_eager_numerics_are_there_and_off() -> None:
    assert config.eager_numerics.division_rounding is False
    assert config.eager_numerics.disable_ftz is False
