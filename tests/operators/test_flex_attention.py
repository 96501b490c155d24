"""FlexAttention, forward: torch's is inside the bound of attention, what it cannot be judged of is
said, wrong results are seen and shown by a script."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from narrowfuzz.arms.operators import EagerWatch, operators_of
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.trace.trace import OperatorCall
from narrowfuzz.triage.prove import proven
from narrowfuzz.triage.verify import RunScript
from samples import recipes
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Mask = Callable[..., torch.Tensor]
SEEN: dict[str, Mask | None] = {
    "all": None,
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i - j).abs() <= 3,
    "of heads": lambda b, h, i, j: (h > 0) | (i >= j),
    "empty rows": lambda b, h, i, j: i % 3 != 1,
}


def watched(
    dtype: str,
    rows: int,
    columns: int,
    heads: tuple[int, int] = (2, 2),
    seen: str = "all",
    **how: Any,
) -> tuple[EagerWatch, torch.Tensor]:
    make = torch.Generator().manual_seed(rows)
    q, k, v = (
        torch.randn(2, h, n, 16, generator=make).to(DTYPES[dtype])
        for h, n in ((heads[0], rows), (heads[1], columns), (heads[1], columns))
    )
    sees = SEEN[seen]
    block = None
    if sees is not None:
        block = create_block_mask(sees, 2, heads[0], rows, columns, device="cpu")
    with EagerWatch() as watch:
        y = flex_attention(q, k, v, block_mask=block, enable_gqa=heads[0] != heads[1], **how)
    return watch, y


def call_of(*args: Any, **how: Any) -> OperatorCall:
    (call,) = operators_of(watched(*args, **how)[0].operators)
    assert call.operator == "flex_attention"
    return call


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 1, (2, 2)), (17, 33, (2, 2)), (40, 129, (4, 2))], ids=str)
@pytest.mark.one_in(12)
def test_torchs_own_is_inside_and_another_result_is_not(dtype: str, seen: str, sizes: Any) -> None:
    call = call_of(dtype, *sizes, seen)
    assert {v.status for v in judge_call("eager", call)} == {"ok"}
    wrong = {"output": call.outputs["output"] * np.float32(1.25)}
    (verdict,) = judge_call("eager", OperatorCall(**{**vars(call), "outputs": wrong}))
    assert verdict.status == "diverged"


def test_a_mask_is_read_as_torch_applies_it() -> None:
    call = call_of("fp32", 9, 12, seen="of heads")
    mask = call.tensors["mask"]
    assert mask.shape == (1, 2, 9, 12) and np.all(mask[0, 1] == 0.0)
    assert np.array_equal(mask[0, 0] == 0.0, np.tri(9, 12, dtype=bool))
    assert np.all(np.isneginf(mask[0, 0][~np.tri(9, 12, dtype=bool)]))
    dead = call_of("bf16", 9, 12, seen="empty rows").outputs["output"][:, :, 1]
    assert not dead.any()


def test_what_cannot_be_judged_is_said() -> None:
    moved, _ = watched("fp32", 5, 7, score_mod=lambda score, b, h, i, j: score + i - j)
    with torch.autocast("cpu", torch.bfloat16):
        narrowed, y = watched("fp32", 5, 7)
    assert y.dtype == torch.bfloat16
    for watch, why in ((moved, "a score_mod"), (narrowed, "autocast narrows")):
        assert not watch.operators
        assert why in watch.unjudged["calls of flex_attention"]
    # its own kernels are no secret where the call is judged
    assert watched("fp32", 5, 7)[0].unjudged == {}


def test_statistics_are_returned_beside_what_is_judged() -> None:
    watch, (y, lse) = watched("fp32", 5, 7, return_lse=True)  # type: ignore[misc]
    (call,) = operators_of(watch.operators)
    assert np.array_equal(call.outputs["output"], y.numpy()) and lse.shape == (2, 2, 5)


@pytest.mark.parametrize(
    ("fault", "fields"),
    [
        ("flex-loses-ragged-key", {"model": "flex_causal", "m": 40, "k": 32, "n": 33, "heads": 2}),
        ("flex-shared-heads-in-turn", {"model": "flex_grouped", "k": 64, "heads": 4}),
    ],
)
def test_a_script_shows_a_fault(fault: str, fields: dict[str, Any], scripts: RunScript) -> None:
    case = Case(
        spec=Spec(recipe="torch.bf16", grad_mode="no_grad", **fields), data=DataSpec(seed=2)
    )
    judge = Judge(recipes(), Ledger([]))
    clean = judge.judge(case)
    assert not clean.causes and ("O25", "ok") in {(v.rule, v.status) for v in clean.verdicts}
    with builtin_faults()[fault].plant():
        (verdict,) = judge.judge(case).causes
        proof = proven(judge, case, verdict, ("", fault), scripts)
    assert (verdict.rule, verdict.role) == ("O25", "flex_attention")
    assert math.isfinite(verdict.factor) and not proof.why, f"{proof.why}\n{proof.output}"
