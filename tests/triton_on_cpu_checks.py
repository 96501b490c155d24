"""Checks of Triton's repaired interpreter, in a process of its own."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton_on_cpu

np.seterr(all="ignore")
torch.set_num_threads(1)
triton_on_cpu.install_torchao()

import triton_operations  # noqa: E402
import triton_torchao  # noqa: E402
from narrowfuzz.case.spec import Case, DataSpec, Spec, Spike  # noqa: E402
from narrowfuzz.judge.judge import Judge, Judgement  # noqa: E402
from narrowfuzz.ledger.ledger import load_ledger  # noqa: E402
from narrowfuzz.numerics.formats import E2M1, decode, encode  # noqa: E402
from narrowfuzz.plants.registry import load_plants  # noqa: E402
from narrowfuzz.recipe.recipe import load_recipes  # noqa: E402
from narrowfuzz.triage.script.choice import script_of  # noqa: E402
from triton_on_cpu import arithmetic, products  # noqa: E402
from triton_on_cpu.install import candidate, install  # noqa: E402
from triton_on_cpu.memory import use_poisoned_torch  # noqa: E402

RECORDED = json.loads((Path(__file__).parent / "triton_on_cpu_h200.json").read_text())
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def digests(results: Iterator[tuple[str, torch.Tensor]]) -> dict[str, str]:
    found = {}
    for name, x in results:
        bits = x.contiguous().view(_WHOLE[x.element_size()]).numpy()
        found[name] = hashlib.sha256(bits.tobytes()).hexdigest()[:16]
    return found


@pytest.mark.heavy
def check_operations_have_the_bits_of_a_gpu() -> None:
    found = digests(triton_operations.results())
    assert found == RECORDED["operations"]


@pytest.mark.heavy
def check_torchaos_kernels_have_the_bits_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # a Hopper has no instruction for E8M0: it took the path without assembly
    monkeypatch.setattr(triton_torchao.mx, "IS_ROCM", triton_operations.tl.constexpr(True))
    found = digests(triton_torchao.results())
    assert found == RECORDED["torchao"]


def check_scales_of_mx_are_read_and_moved_as_on_a_gpu() -> None:
    """A scale of byte 0 is zero there: 2^-127 is below the normal numbers."""
    assert digests(triton_torchao.mx_results()) == RECORDED["mx"]


def check_a_product_is_exact_where_no_order_matters() -> None:
    make = np.random.default_rng(0)
    a, b = (make.integers(-8, 9, (16, 32)).astype(np.float32) for _ in range(2))
    tl = triton_operations.tl
    codes = [arithmetic.to_storage(x, tl.float8e4nv) for x in (a, b)]
    zero = np.zeros((16, 16), np.float32)
    found = arithmetic.product(codes[0], tl.float8e4nv, codes[1].T, tl.float8e4nv, zero)
    assert np.array_equal(found, a @ b.T)


def check_a_fused_sum_rounds_once() -> None:
    """1 + 2^-24 + 2^-48 is above the tie that both sums would round down from."""
    a, b = np.float32([1.0 + 2.0**-12]), np.float32([1.0 + 2.0**-12])
    c = np.float32([2.0**-48 - 2.0**-11 + 2.0**-23])
    exact = (1.0 + 2.0**-12) ** 2 + float(c[0])
    assert arithmetic.fused_fp32(a, b, c)[0] == np.float32(exact)


def check_an_exponents_byte_is_rounded_up() -> None:
    x = np.float32([0.0, 2.0**-127, 2.0**-126, 1.0, 1.0000001, -3.0, np.inf, np.nan, 3e38])
    assert arithmetic.e8m0_up(x).tolist() == [0, 0, 1, 127, 128, 129, 254, 255, 254]


def check_rounding_to_e4m3_toward_zero_is_refused() -> None:
    x, y = torch.ones(256), torch.empty(256, dtype=torch.float8_e4m3fn)
    with pytest.raises(Exception, match="toward zero"):
        triton_operations.launched(triton_operations.cut, x, y, triton_operations.TYPES["e4m3"][1])


def check_e2m1_is_rounded_to_nearest() -> None:
    """All bf16 numbers and those halfway between two codes, beside the reference's own cast."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = np.concatenate([every.numpy(), np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -2.5])])
    x = x[np.isfinite(x)]
    found = arithmetic.e2m1_nearest(x, x[::-1])
    assert np.array_equal(found & 15, encode(x, E2M1))
    assert np.array_equal(found >> 4, encode(x[::-1], E2M1))
    nans = np.float32([np.nan, -np.nan])
    assert arithmetic.e2m1_nearest(nans, np.float32([np.inf, -np.inf])).tolist() == [0x77, 0xF7]


def check_e2m1_by_chance_rounds_up_as_often_as_it_should() -> None:
    bits = np.arange(65536, dtype=np.int64)
    for x, low, high, part in (
        (0.625, 0.5, 1.0, 0.25),
        (-4.5, -4.0, -6.0, 0.25),
        (3.0, 3.0, 4.0, 0),
    ):
        numbers = np.full(bits.shape, x, np.float32)
        both = arithmetic.e2m1_by_chance(numbers, numbers, bits | bits << 16)
        for half in (both & 15, both >> 4):
            values = decode(half.astype(np.uint8), E2M1)
            assert np.isin(values, [low, high]).all()
            assert (values == high).mean() == part


@triton_operations.triton.jit
def beside(x, y, n, shift):  # type: ignore[no-untyped-def]
    tl = triton_operations.tl
    at = tl.arange(0, 32)
    tl.store(y + at + shift, tl.load(x + at + n))


def check_a_store_outside_is_refused_and_a_load_outside_is_nan() -> None:
    x, y = torch.ones(40), torch.zeros(40)
    beside[(1,)](x, y, 8, 8)
    assert y.tolist() == [0.0] * 8 + [1.0] * 32
    beside[(1,)](x, y, 16, 0)
    assert y[:24].tolist() == [1.0] * 24 and y[24:32].isnan().all()
    before = y.clone()
    with pytest.raises(triton_on_cpu.OutsideError) as error:
        beside[(1,)](x, y, 0, 10)
    assert str(error.value) == (
        "beside writes 8 bytes outside of y: from byte 160 to byte 168 of 160"
    )
    assert same_tensor(y, before)


@triton_operations.triton.jit
def over(y, shift, STEP: triton_operations.tl.constexpr):  # type: ignore[no-untyped-def]
    tl = triton_operations.tl
    at, program = tl.arange(0, 32), tl.program_id(0)
    tl.store(y + program * shift + at // STEP, program * shift + at)


def check_two_values_in_one_place_are_refused() -> None:
    y = torch.zeros(64, dtype=torch.int32)
    over[(2,)](y, 32, 1)
    assert y.tolist() == list(range(64))
    over[(2,)](y, 16, 1)  # two programs, but the same values
    with pytest.raises(
        triton_on_cpu.WrittenTwiceError, match=r"^over writes 16 numbers of y twice"
    ):
        over[(1,)](y, 0, 2)
    sums[(2,)](y)
    with pytest.raises(triton_on_cpu.WrittenTwiceError, match=r"^programs writes 32 numbers of y"):
        programs[(2,)](y)


@triton_operations.triton.jit
def programs(y):  # type: ignore[no-untyped-def]
    tl = triton_operations.tl
    tl.store(y + tl.arange(0, 32), tl.program_id(0) + tl.zeros((32,), tl.int32))


@triton_operations.triton.jit
def sums(y):  # type: ignore[no-untyped-def]
    """A program may write again what it wrote, and add to what others add to."""
    tl = triton_operations.tl
    at = tl.program_id(0) * 32 + tl.arange(0, 32)
    tl.store(y + at, at)
    tl.store(y + at, at + 1)
    tl.atomic_add(y + at, at)


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a.view(torch.uint8) == b.view(torch.uint8)).all())


def check_what_no_kernel_writes_is_nan() -> None:
    module = SimpleNamespace(torch=torch)
    use_poisoned_torch(module)
    use_poisoned_torch(module)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        assert module.torch.empty(3, dtype=dtype).float().isnan().all()
    assert module.torch.empty_like(torch.zeros(2, dtype=torch.uint8)).tolist() == [255, 255]
    assert module.torch.cuda.get_device_properties("cpu").multi_processor_count == 1
    assert module.torch.zeros is torch.zeros


def check_every_candidate_is_taken_and_the_same_for_the_same_sizes() -> None:
    sizes = [(128 * rows, 128 * columns) for rows in range(1, 9) for columns in range(1, 9)]
    taken = [candidate("kernel", size, 6) for size in sizes]
    assert set(taken) == set(range(6))
    assert taken == [candidate("kernel", (None, *size, True, 0.5), 6) for size in sizes]


def check_products_of_tiled_scales() -> None:
    from torchao.prototype.mx_formats.utils import to_blocked

    make = torch.Generator().manual_seed(0)
    scales = torch.randint(120, 132, (130, 5), generator=make, dtype=torch.uint8)
    assert torch.equal(products.untiled(to_blocked(scales), 130, 5), scales)
    codes = torch.randn(130, 160, generator=make).to(torch.float8_e4m3fn)
    tiled = to_blocked(scales).view(torch.float8_e8m0fnu)
    found = products.mx_scaled_mm(codes, codes.t(), tiled, tiled)
    x = codes.double() * torch.exp2(scales.double() - 127).repeat_interleave(32, dim=1)
    assert torch.allclose(found.double(), x @ x.t(), rtol=2**-8, atol=1e-5)


NAN = Spike(tensor="input", row=3, col=5, bits="0x7fc00000")
#: Of these nothing is multiplied, or no more than a forward, and the error is all that is judged.
REFUSED = (
    "blockwise-noncontiguous-input",
    "blockwise-shape-refusals",
    "mx-dim1-tiles-outside",
    "mx-triton-refusals",
    "nvfp4-shape-refusals",
)
FLOOR, RCEIL = {"recipe": "torchao.mxfp8.floor"}, {"recipe": "torchao.mxfp8.rceil"}
NVFP4 = {"recipe": "torchao.nvfp4"}
GROUPS = {
    "recipe": "torch.bf16",
    "backend": "native",
    "model": "fp8_grouped_rowwise",
    **{"m": 40, "k": 24, "n": 3},
}
#: Of 1, 0, 16 and 143 rows.
BLOCKS = {**GROUPS, "model": "fp8_grouped_blockwise", "m": 160, "k": 40, "n": 4}
#: Cases of torchao's Triton kernels, and the known issue that each shows, "" for none.
KNOWN: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("blockwise-nan-hidden", {"data": DataSpec(seed=1, spikes=(NAN,))}),
    ("blockwise-noncontiguous-input", {"input_layout": "transposed"}),
    ("blockwise-shape-refusals", {"m": 64}),
    ("blockwise-swap-drops-module-state", {"model": "hooked"}),
    ("blockwise-swap-drops-own-forward", {"model": "own_forward"}),
    ("mx-dim1-tiles-outside", RCEIL),
    ("", {**RCEIL, "m": 256, "k": 256, "n": 256}),
    (
        "mx-byte0-triton",
        {**RCEIL, "data": DataSpec(seed=1, values="subnormal"), "m": 256, "k": 256, "n": 256},
    ),
    (
        "mx-floor-triton-nan",
        {**FLOOR, "data": DataSpec(seed=1, spikes=(NAN,)), "m": 256, "k": 256, "n": 256},
    ),
    ("mx-triton-refusals", {**RCEIL, "input_layout": "transposed"}),
    ("mx-triton-refusals", {**FLOOR, "dtype": "fp32"}),
    ("", NVFP4),
    ("", {**NVFP4, "data": DataSpec(seed=1, spikes=(NAN,))}),
    ("nvfp4-shape-refusals", {**NVFP4, "m": 64}),
    ("nvfp4-swap-drops-module-state", {**NVFP4, "model": "hooked"}),
    ("nvfp4-swap-drops-own-forward", {**NVFP4, "model": "own_forward"}),
    ("", GROUPS),
    ("fp8-grouped-nan-hidden", {**GROUPS, "data": DataSpec(seed=1, spikes=(NAN,))}),
    ("", BLOCKS),
    ("", {**BLOCKS, "model": "fp8_grouped_blockwise_straddled", "dtype": "fp32"}),
    ("blockwise-nan-hidden", {**BLOCKS, "data": DataSpec(seed=1, spikes=(NAN,))}),
]


def judged(how: dict[str, Any], repeat: bool = False) -> tuple[Judgement, set[str]]:
    """The judgement of a case, and the known issues that it shows. Each runs once unless asked to
    ``repeat``, for rule O1: the interpreter is slow."""
    fields = {
        "recipe": "torchao.blockwise_fp8",
        "backend": "triton",
        "dtype": "bf16",
        "m": 128,
        "k": 128,
        "n": 128,
        **how,
    }
    data = fields.pop("data", DataSpec(seed=1))
    spec = Spec(**fields)
    judge = Judge(load_recipes(), load_ledger(), arms=frozenset({"eager"}))
    case = Case(spec=spec, data=data)
    judgement = judge.judge(case, repeat=repeat)
    return judgement, {v.explained_by or judge.known_as(case, v) for v in judgement.known}


def wrong_kernel(recipe: str, model: str = "") -> tuple[Any, str]:
    """Of a recipe and a model a module, and its function that makes codes and scales."""
    from torchao.prototype.blockwise_fp8_training import linear
    from torchao.prototype.moe_training import fp8_grouped_mm
    from torchao.prototype.moe_training.blockwise_fp8 import grouped_mm_backend
    from torchao.prototype.moe_training.nvfp4_training import nvfp4_linear
    from torchao.prototype.mx_formats import mx_tensor

    if "blockwise" in model:
        return grouped_mm_backend, "triton_fp8_blockwise_weight_quant_grouped_transposed_rhs"
    return {
        "torch.bf16": (fp8_grouped_mm, "triton_fp8_colwise_3d_scale_and_cast"),
        "torchao.blockwise_fp8": (linear, "triton_fp8_blockwise_weight_quant_transposed_rhs"),
        "torchao.nvfp4": (nvfp4_linear, "triton_weight_quantize_2d"),
    }.get(recipe, (mx_tensor, "triton_to_mxfp8_dim0"))


@pytest.mark.one_in(40)
@pytest.mark.parametrize(("known", "how"), KNOWN)
def check_torchaos_kernels_are_judged(
    known: str,
    how: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The entry explains its case, and nothing of a wrong kernel beside it."""
    judgement, found = judged(how, repeat=request.node.get_closest_marker("heavy") is not None)
    assert not judgement.causes
    assert found == ({known} if known else set())
    recipe = how.get("recipe", "torchao.blockwise_fp8")
    module, name = wrong_kernel(recipe, how.get("model", ""))
    usual = getattr(module, name)
    # a scale of byte 0 cannot be halved, and an operator by itself has no tap on its operands
    at, rule = (0, "O2") if "byte0" in known else (1, "O25" if recipe == "torch.bf16" else "O3")

    def halved(*args: Any, **kwargs: Any) -> Any:
        made = list(usual(*args, **kwargs))
        made[at] = (made[at].float() * 0.5).to(made[at].dtype)
        return tuple(made)

    monkeypatch.setattr(module, name, halved)
    if known not in REFUSED:
        assert rule in {verdict.rule for verdict in judged(how)[0].causes}


@pytest.mark.parametrize(
    ("known", "how"),
    [
        ("fp8-groups-by-average", {"model": "fp8_cast_columns", "k": 64, "n": 2}),
        ("fp8-groups-by-columns-mask", {"model": "fp8_cast_columns", "k": 16, "n": 3}),
        ("fp8-groups-by-rows-stride", {"model": "fp8_cast_rows"}),
        ("mx-rearrange-power-of-two", {"model": "mx_scales", "n": 5}),
        ("", {"model": "mx_scales", "k": 70, "n": 6}),
        ("", {"model": "mx_scales", "n": 8, "dtype": "fp32"}),
        ("mx-permute-padding-row", {"model": "permuted_rows_by_torch", "k": 64}),
        ("", {"model": "permuted_rows", "k": 300, "n": 0}),
        ("", {"model": "permuted_rows", "k": 32, "n": 1}),
        ("", {"model": "permuted_rows", "k": 32, "n": 2, "m": 280}),
        ("", {"model": "permuted_rows", "k": 7, "n": 3}),
        ("", {"model": "permuted_rows", "k": 64, "n": 4}),
        ("", {"model": "fp8_cast_columns", "k": 128, "n": 1}),
        ("", {"model": "fp8_cast_both", "k": 20, "n": 2}),
        ("fp8-grouped-nan-hidden", {"model": "fp8_cast_both", "data": DataSpec(spikes=(NAN,))}),
    ],
)
def check_casts_of_groups_are_judged(known: str, how: dict[str, Any]) -> None:
    judgement, found = judged(GROUPS | how)
    assert not judgement.causes
    assert found == ({known} if known else set())


PLANTS = load_plants(Path(__file__).resolve().parents[1] / "benchmarks/triton_faults.py")


@pytest.mark.one_in(40)
@pytest.mark.parametrize("name", [n for n, p in PLANTS.items() if n.startswith("triton-groups-")])
def check_faults_of_groups_are_seen_and_rewrites_are_not(name: str) -> None:
    """Groups of 16, 0 and 40 rows, of numbers so unlike that some are subnormal as codes."""
    wide = DataSpec(seed=1, values="heavy_tail")
    with PLANTS[name].plant():
        judgement, _ = judged(GROUPS | {"m": 56, "k": 32, "data": wide})
    assert bool(judgement.causes) != PLANTS[name].legal


@pytest.mark.parametrize("name", [n for n in PLANTS if n.startswith("triton-moves-")])
def check_faults_of_what_is_moved_are_seen(name: str) -> None:
    (model,) = PLANTS[name].models
    how = GROUPS | {"model": model, "k": 64, "n": 6 if model == "mx_scales" else 0}
    with PLANTS[name].plant():
        judgement, _ = judged(how)
    assert {verdict.rule for verdict in judgement.causes} == {"O25"}


@pytest.mark.one_in(40)
@pytest.mark.parametrize("name", [n for n in PLANTS if n.startswith("triton-group-blocks-")])
def check_faults_of_groups_in_blocks_are_seen_and_rewrites_are_not(name: str) -> None:
    """Groups of 1, 0, 16 and 128 rows, padded, of numbers so unlike that blocks differ."""
    wide = DataSpec(seed=1, values="heavy_tail")
    with PLANTS[name].plant():
        judgement, _ = judged(BLOCKS | {"m": 145, "data": wide})
    assert bool(judgement.causes) != PLANTS[name].legal


@pytest.mark.heavy
@pytest.mark.parametrize("model", ["linear", "mlp_swiglu"])
def check_a_script_reads_two_levels_of_scales(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It does not show what only a wrong kernel in this process does."""
    module, name = wrong_kernel("torchao.nvfp4")
    usual = getattr(module, name)

    def halved(*args: Any, **kwargs: Any) -> Any:
        codes, scales, *others = usual(*args, **kwargs)
        return codes, (scales.float() * 0.5).to(scales.dtype), *others

    monkeypatch.setattr(module, name, halved)
    judgement, _ = judged({**NVFP4, "model": model})
    verdict = next(one for one in judgement.causes if one.rule == "O3")
    script = tmp_path / "repro.py"
    script.write_text(script_of(judgement.case, verdict, load_recipes()["torchao.nvfp4"]))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "expected byte" in done.stdout


@pytest.mark.heavy
def check_what_is_rounded_by_chance_may_be_either_neighbour(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torchao.prototype.moe_training.nvfp4_training import nvfp4_linear

    usual = nvfp4_linear.triton_rht_quantize_row_col

    def negated(*args: Any, **kwargs: Any) -> Any:
        *columns, codes, scales = usual(*args, **kwargs)
        return *columns, codes ^ 0x88 if kwargs["stochastic_rounding"] else codes, scales

    monkeypatch.setattr(nvfp4_linear, "triton_rht_quantize_row_col", negated)
    judgement, _ = judged(NVFP4)
    verdict = next(one for one in judgement.causes if one.rule == "O2")
    assert "expected between" in verdict.sentence()
    script = tmp_path / "repro.py"
    script.write_text(script_of(judgement.case, verdict, load_recipes()["torchao.nvfp4"]))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def check_it_is_installed_once() -> None:
    assert install() == triton_operations.triton.__version__
