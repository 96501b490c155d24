"""What torch refuses of a GPU's FP8 multiply before any kernel runs, against what we say of it.

Under FakeTensorMode a tensor may be on a GPU that is not here; ``_scaled_mm``'s meta function then
speaks for it, as it does while a model is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from narrowfuzz.case.spec import Spec
from narrowfuzz.machine.simulated import _check
from narrowfuzz.recipe.recipe import load_recipes
from torch._subclasses.fake_tensor import FakeTensorMode

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = load_recipes()


@dataclass(frozen=True)
class Multiply:
    """What is multiplied: M x K by K x N."""

    m: int = 16
    k: int = 32
    n: int = 48
    a: torch.dtype = E4M3
    b: torch.dtype = E4M3
    out: torch.dtype = torch.bfloat16
    rowwise: bool = False
    bias: torch.dtype | None = None

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        a = torch.empty(self.m, self.k, device="cuda", dtype=self.a)
        b = torch.empty(self.n, self.k, device="cuda", dtype=self.b).t()
        if self.bias is None:
            return a, b, None
        return a, b, torch.empty(self.n, device="cuda", dtype=self.bias)

    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = ((self.m, 1), (1, self.n)) if self.rowwise else ((), ())
        a, b = (torch.empty(size, device="cuda") for size in sizes)
        return a, b


def refused_by_torch(what: Multiply, *, public: bool) -> str:
    """What the meta function says, "" if it makes a result."""
    with FakeTensorMode():
        a, b, bias = what.operands()
        a_scale, b_scale = what.scales()
        try:
            if public:
                kind = F.ScalingType.RowWise if what.rowwise else F.ScalingType.TensorWise
                F.scaled_mm(a, b, a_scale, kind, b_scale, kind, bias=bias, output_dtype=what.out)
            else:
                torch._scaled_mm(a, b, a_scale, b_scale, bias=bias, out_dtype=what.out)
        except RuntimeError as error:
            return str(error)
    return ""


def refused_by_us(what: Multiply) -> bool:
    with FakeTensorMode():
        a, b, bias = what.operands()
        try:
            _check(a, b, bias, what.out)
        except (RuntimeError, ValueError):
            return True
    return False


ALIGNED = [
    Multiply(), Multiply(m=17), Multiply(a=E5M2), Multiply(rowwise=True), Multiply(m=0),
    Multiply(rowwise=True, out=torch.float32),  # cuBLASLt, on Hopper since CUDA 12.9
]  # fmt: skip
MISALIGNED = [Multiply(k=24), Multiply(n=24), Multiply(k=33, n=33)]
#: The kernel says no (aten/src/ATen/native/cuda/ScaledBlas.cpp), and the meta function nothing.
LATE = [
    Multiply(a=E5M2, b=E5M2),
    Multiply(out=torch.float32, bias=torch.float32),
]


#: What no FP8 multiply takes: whose meta function takes it asks sizes alone.
NOT_FP8 = Multiply(a=torch.bfloat16, b=torch.bfloat16)


@pytest.mark.parametrize("public", [False, True], ids=["_scaled_mm", "F.scaled_mm"])
@pytest.mark.parametrize("rowwise", [False, True], ids=["tensor", "row"])
@pytest.mark.parametrize("what", MISALIGNED, ids=str)
def test_a_misaligned_size_is_refused_by_both(what: Multiply, rowwise: bool, public: bool) -> None:
    """That of F.scaled_mm leaves it to the kernel where it leaves the operands' types to it, too:
    pytorch#185273 moved both there."""
    asked = replace(what, rowwise=rowwise)
    said = refused_by_torch(asked, public=public)
    if public and not refused_by_torch(NOT_FP8, public=True):
        assert not said
    else:
        assert "divisible by 16" in said
    assert refused_by_us(asked)


@pytest.mark.parametrize("public", [False, True], ids=["_scaled_mm", "F.scaled_mm"])
@pytest.mark.parametrize("what", ALIGNED, ids=str)
def test_what_is_aligned_is_refused_by_neither(what: Multiply, public: bool) -> None:
    assert not refused_by_torch(what, public=public) and not refused_by_us(what)


@pytest.mark.parametrize("what", LATE, ids=str)
def test_what_only_the_kernel_refuses_compiles(what: Multiply) -> None:
    """So on a compiled rung these come when the graph runs, not when it is made."""
    assert refused_by_us(what) and not refused_by_torch(what, public=False)


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [("torch.scaled_mm", "tensorwise"), ("torch.scaled_mm", "rowwise_v1"),
     ("torchao.float8.tensorwise", "real"), ("torchao.float8.rowwise", "real")],
)  # fmt: skip
@pytest.mark.parametrize("sizes", [(16, 32, 48), (16, 24, 48), (16, 32, 24), (17, 32, 48)], ids=str)
def test_a_recipe_expects_a_refusal_where_one_of_its_gemms_is_refused(
    recipe: str, backend: str, sizes: tuple[int, int, int]
) -> None:
    """output contracts K, grad_input N and grad_weight the tokens."""
    m, k, n = sizes
    gemms = (Multiply(m, k, n), Multiply(m, n, k), Multiply(n, m, k))
    refused = any("divisible by 16" in refused_by_torch(gemm, public=False) for gemm in gemms)
    spec = Spec(recipe=recipe, backend=backend, m=m, k=k, n=n)
    assert bool(RECIPES[recipe].refusal(spec, "cuda")) == refused
    assert RECIPES[recipe].refusal(spec, "cpu") == ""
