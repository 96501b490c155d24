"""Our blockwise reference against torchao's own torch quantisers, bit for bit.

Their module imports Triton, so the three functions are run from the installed file's text.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from narrowfuzz.numerics import reference
from narrowfuzz.numerics.formats import F32
from narrowfuzz.numerics.plan import OPERANDS, OperandPlan
from narrowfuzz.operators.linear import single_reference
from samples import recipes

torch = pytest.importorskip("torch")
torchao = pytest.importorskip("torchao")

RECIPE = recipes()["torchao.blockwise_fp8"]
EPS = 1e-12


def library() -> dict[str, Any]:
    """torchao's torch_blockwise_scale_* functions."""
    file = Path(torchao.__file__).parent / "prototype/blockwise_fp8_training/kernels.py"
    wanted = [
        node
        for node in ast.parse(file.read_text()).body
        if (isinstance(node, ast.FunctionDef) and node.name.startswith("torch_blockwise"))
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("EPS",))
    ]
    dtype = torch.float8_e4m3fn
    names: dict[str, Any] = {
        "torch": torch, "e4m3_dtype": dtype, "FP8_E4M3_DTYPES": {dtype}, "Tuple": tuple,
    }  # fmt: skip
    exec(compile(ast.Module(wanted, []), str(file), "exec"), names)
    return names


LIBRARY = library()


def data(rows: int, cols: int, seed: int, dtype: Any) -> Any:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, cols)) * 2.0 ** rng.integers(-30, 30, size=(rows, cols))
    x[:128] *= 2.0**-60  # amax below EPS
    x[3] = 0.0
    x[5, 7], x[130, 200], x[200, 10] = 3e38, np.inf, np.nan
    x[129, ::3] = 448.0 * (1.0 + np.arange(len(x[129, ::3])) * 2.0**-20)
    return torch.from_numpy(x.astype(np.float32)).to(dtype)


def check(x: Any, plan: OperandPlan, codes: Any, inverse: Any) -> None:
    values: F32 = x.float().numpy()
    got = reference.quantise(values, plan)
    assert got is not None
    theirs = codes.contiguous().view(torch.uint8).numpy()
    nan = (theirs & 0x7F) == 0x7F
    assert np.array_equal((got.codes & 0x7F) == 0x7F, nan)
    assert np.array_equal(got.codes[~nan], theirs[~nan])
    with np.errstate(divide="ignore"):
        assert np.array_equal(np.float32(1.0) / got.scale, inverse.numpy(), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_quantisers_agree_bit_for_bit(seed: int, dtype: Any) -> None:
    assert LIBRARY["EPS"] == EPS
    gemms = RECIPE.plan(None).gemms  # type: ignore[arg-type]  # one plan for every Spec
    x = data(256, 384, seed, dtype)
    check(x, gemms["output"].a, *LIBRARY["torch_blockwise_scale_act_quant_lhs"](x))
    check(x, gemms["output"].b, *LIBRARY["torch_blockwise_scale_weight_quant"](x))
    # grad_weight's B: the input's columns, in blocks of tokens
    codes, inverse = LIBRARY["torch_blockwise_scale_act_quant_rhs"](x)
    check(x.t(), gemms["grad_weight"].b, codes.t(), inverse.t())


def test_a_weight_tile_transposes_into_itself() -> None:
    """One 128x128 scale serves output and grad_input: the library quantises the weight twice with
    the same squares, and so does the plan."""
    x = data(256, 384, 9, torch.float32).float().numpy()
    gemms = RECIPE.plan(None).gemms  # type: ignore[arg-type]
    assert OPERANDS["output"][1] == ("weight", False) and OPERANDS["grad_input"][1][1]
    straight = reference.quantise(x, gemms["output"].b)
    turned = reference.quantise(np.ascontiguousarray(x.T), gemms["grad_input"].b)
    assert straight is not None and turned is not None
    assert np.array_equal(straight.codes.T, turned.codes)
    assert np.array_equal(straight.scale.T, turned.scale, equal_nan=True)


def test_scales_that_overflow_together_are_those_of_a_row_of_blocks() -> None:
    """Hopper multiplies both scales of a block first: [rows, 1] of each operand, whatever their
    granules are."""
    shapes = {"input": (256, 384), "weight": (128, 384), "grad_output": (256, 128)}
    tensors = {name: np.ones(shape, dtype=np.float32) for name, shape in shapes.items()}
    plan = RECIPE.plan(None)  # type: ignore[arg-type]
    usual = single_reference(plan, "bf16", tensors)
    assert usual.rescale_overflows("output").shape == (256, 128)
    assert usual.rescale_overflows("grad_input").shape == (256, 384)
    assert usual.rescale_overflows("grad_weight").shape == (128, 384)
    assert not usual.rescale_overflows("output").any()
    tensors["input"][5, 130] = tensors["weight"][7, 300] = np.float32(2.0**126)
    overflows = single_reference(plan, "bf16", tensors).rescale_overflows("output")
    assert overflows[5].all() and not overflows[4].any()
