"""Checks of Triton's repaired interpreter, in a process of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton_on_cpu

np.seterr(all="ignore")
torch.set_num_threads(1)
triton_on_cpu.install()

import triton_operations  # noqa: E402
import triton_torchao  # noqa: E402
from narrowfuzz.case.spec import Case, DataSpec, Spec, Spike  # noqa: E402
from narrowfuzz.judge.judge import Judge, Judgement  # noqa: E402
from narrowfuzz.ledger.ledger import load_ledger  # noqa: E402
from narrowfuzz.recipe.recipe import load_recipes  # noqa: E402
from triton_on_cpu import arithmetic  # noqa: E402
from triton_on_cpu.install import install  # noqa: E402

RECORDED = json.loads((Path(__file__).parent / "triton_on_cpu_h200.json").read_text())
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def digests(results: Iterator[tuple[str, torch.Tensor]]) -> dict[str, str]:
    found = {}
    for name, x in results:
        bits = x.contiguous().view(_WHOLE[x.element_size()]).numpy()
        found[name] = hashlib.sha256(bits.tobytes()).hexdigest()[:16]
    return found


def check_operations_have_the_bits_of_a_gpu() -> None:
    found = digests(triton_operations.results())
    assert found == RECORDED["operations"]


def check_torchaos_kernels_have_the_bits_of_a_gpu() -> None:
    found = digests(triton_torchao.results())
    assert found == RECORDED["torchao"]


def check_a_product_is_exact_where_no_order_matters() -> None:
    make = np.random.default_rng(0)
    a, b = (make.integers(-8, 9, (16, 32)).astype(np.float32) for _ in range(2))
    tl = triton_operations.tl
    codes = [arithmetic.narrow(x, tl.float8e4nv) for x in (a, b)]
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


NAN = Spike(tensor="input", row=3, col=5, bits="0x7fc00000")
#: Of these nothing is multiplied, or no more than a forward, and the error is all that is judged.
REFUSED = ("blockwise-noncontiguous-input", "blockwise-shape-refusals")
#: Cases of torchao's blockwise FP8, and the known issue that each shows.
KNOWN = {
    "": {},
    "blockwise-nan-hidden": {"data": DataSpec(seed=1, spikes=(NAN,))},
    "blockwise-noncontiguous-input": {"input_layout": "transposed"},
    "blockwise-shape-refusals": {"m": 64},
    "blockwise-swap-drops-module-state": {"model": "hooked"},
    "blockwise-swap-drops-own-forward": {"model": "own_forward"},
}


def blockwise(known: str) -> Judgement:
    how = {"m": 128, "k": 128, "n": 128, "data": DataSpec(seed=1), **KNOWN[known]}
    data = how.pop("data")
    spec = Spec(recipe="torchao.blockwise_fp8", backend="triton", **how)
    judge = Judge(load_recipes(), load_ledger(), arms=frozenset({"eager"}))
    case = Case(spec=spec, data=data)
    judgement = judge.judge(case)
    found = {judge.known_as(case, verdict) for verdict in judgement.known}
    assert found == ({known} if known else set())
    return judgement


@pytest.mark.parametrize("known", KNOWN)
def check_blockwise_fp8_is_judged(known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry explains its case, and nothing of a wrong kernel beside it."""
    assert not blockwise(known).causes
    from torchao.prototype.blockwise_fp8_training import linear

    name = "triton_fp8_blockwise_weight_quant_transposed_rhs"
    usual = getattr(linear, name)

    def halved(*args: Any, **kwargs: Any) -> Any:
        codes, scale = usual(*args, **kwargs)
        return codes, scale * 0.5

    monkeypatch.setattr(linear, name, halved)
    if known not in REFUSED:
        assert "O3" in {verdict.oracle for verdict in blockwise(known).causes}


def check_it_is_installed_once() -> None:
    assert install() == triton_operations.triton.__version__
