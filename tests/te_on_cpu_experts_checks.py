"""Checks of TransformerEngine's router and movement of tokens on the emulated extension, for pytest
in a process of its own: against autograd, and judged by the operators' bounds."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from narrowfuzz.arms.operators import EagerWatch, operators_of
from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.models.te_experts import TE_EXPERTS
from narrowfuzz.numerics.accumulator import Unjudged
from narrowfuzz.operators import BY_NAME
from narrowfuzz.rules.operators import judge_call
from narrowfuzz.triage.script.parts import model_source
from te_on_cpu.environment import real_extension
from te_on_cpu.refusal import UnsupportedByEmulation
from te_on_cpu.v2 import refused_modules
from transformer_engine.pytorch import moe_permute, moe_unpermute
from transformer_engine.pytorch.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

BF16, FP16 = torch.bfloat16, torch.float16
HERE = [
    model.name
    for model in TE_EXPERTS
    if not model.interpreted or importlib.util.find_spec("triton") is not None
]
each_model = pytest.mark.parametrize("name", HERE)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
SCORES = {
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(1)


def expected(x, chosen, kind, early, topk, factor):
    """The weights in float64, of the experts that were chosen."""
    if kind == "softmax" and not early:
        return factor * torch.where(chosen, x, -torch.inf).softmax(-1)
    values = torch.where(chosen, SCORES[kind](x), 0.0)
    if kind != "softmax" and topk > 1:
        values = values / (values.sum(-1, keepdim=True) + 1e-20)
    return factor * values


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("topk", "groups"), [(1, None), (2, None), (4, 4), (17, None)])
@pytest.mark.parametrize("factor", [None, 2.5])
def check_router_as_by_autograd(kind, early, topk, groups, factor):
    x = torch.randn(9, 24, requires_grad=True)
    bias = None if kind == "softmax" else torch.linspace(-0.25, 0.25, 24)
    probs, chosen = fused_topk_with_score_function(
        x, topk, early, groups, groups and groups // 2, factor, kind, bias
    )
    assert chosen.dtype == torch.bool
    assert (chosen.sum(-1) == topk).all()
    if not groups:
        score = SCORES[kind](x) if bias is None else SCORES[kind](x) + bias
        assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, score.topk(topk)[1], True))
    else:
        assert (chosen.reshape(9, groups, -1).any(-1).sum(-1) <= groups // 2).all()
    twin = x.detach().double().requires_grad_()
    right = expected(twin, chosen, kind, early, topk, factor or 1.0)
    grad = torch.randn(9, 24)
    probs.backward(grad)
    right.backward(grad.double())
    torch.testing.assert_close(probs.double(), right, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), twin.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(real_extension(), reason="which of equal scores wins is the kernels' own")
def check_ties_as_a_warp_breaks_them():
    equal = torch.zeros(1, 40)
    for topk, winners in ((3, [0, 16, 32]), (16, list(range(16)))):
        _, chosen = fused_topk_with_score_function(
            equal, topk, False, None, None, None, "sigmoid", None
        )
        assert chosen.nonzero()[:, 1].tolist() == winners


def check_map_of_bits():
    x = torch.randn(5, 13)
    given = (x, 3, False, None, None, None, "sigmoid", None)
    _, chosen = fused_topk_with_score_function(*given)
    _, bits = fused_topk_with_score_function(*given, routing_map_format="bitmap_u8")
    assert bits.shape == (5, 2)
    unpacked = np.unpackbits(bits.cpu().numpy(), axis=1, bitorder="little")[:, :13]
    assert np.array_equal(unpacked.astype(bool), chosen.cpu().numpy())
    indices = torch.empty(5, 3, dtype=torch.int32)
    x.requires_grad_()
    probs, _ = fused_topk_with_score_function(*given, topk_indices=indices)
    assert torch.equal(torch.zeros_like(chosen).scatter(1, indices.long(), True), chosen)
    probs.sum().backward()


@each_dtype
def check_auxiliary_loss(dtype):
    probs = torch.rand(9, 6).to(dtype).requires_grad_()
    counts = torch.tensor([0, 3, 2, 5, 7, 1])
    for tokens in (9, torch.tensor(9)):
        probs.grad = None
        loss = fused_moe_aux_loss(probs, counts, tokens, 6, 2, 0.5)
        right = 0.5 * 6 / 2 / 81 * (probs.detach().double().sum(0) * counts).sum()
        torch.testing.assert_close(loss.double(), right, rtol=8e-3, atol=0)
        loss.backward()
        row = 0.5 * 6 / 2 / 81 * counts.double()
        torch.testing.assert_close(probs.grad.double(), row.expand(9, 6), rtol=8e-3, atol=0)
    with pytest.raises(RuntimeError, match="must be a multiple of number of experts"):
        fused_moe_aux_loss(probs, counts, 9, 4, 2, 0.5)


def check_scores_for_it():
    for kind, score in SCORES.items():
        x = torch.randn(7, 10, requires_grad=True)
        chosen, scores = fused_compute_score_for_moe_aux_loss(x, 3, kind)
        twin = x.detach().double().requires_grad_()
        right = score(twin) / score(twin).sum(-1, keepdim=True)
        assert (chosen.sum(-1) == 3).all()
        scores.backward(torch.eye(7, 10))
        right.backward(torch.eye(7, 10).double())
        torch.testing.assert_close(scores.double(), right, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(x.grad.double(), twin.grad, rtol=1e-4, atol=1e-5)


def check_index_map_moves_and_drops():
    rows = torch.randn(4, 16, dtype=BF16)
    index = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]], dtype=torch.int32)
    sent, places = moe_permute(rows, index, 5, map_type="index")
    assert torch.equal(sent, rows[[0, 2, 1, 2, 3]])
    assert places.tolist() == [-1, 2, 1, -1, 0, -1, 3, 4]
    weights = torch.tensor([[0.5, 0.3], [1.0, 1.0], [0.1, 0.7], [0.0, 3.0]])
    back = moe_unpermute(sent, places, weights, map_type="index")
    right = torch.stack(
        [
            rows[0] * weights[0, 1].bfloat16(),
            rows[1] * weights[1, 0].bfloat16(),
            rows[2] * weights[2, 0].bfloat16() + rows[2] * weights[2, 1].bfloat16(),
            rows[3] * weights[3, 1].bfloat16(),
        ]
    )
    assert torch.equal(back, right)
    masked = torch.tensor([[-1, 0], [1, -1]], dtype=torch.int32)
    sent, _ = moe_permute(rows[:2], masked, 2, map_type="index")  # as unsigned, -1 comes last
    assert torch.equal(sent, rows[:2])


@pytest.mark.skipif(real_extension(), reason="the emulation's own refusals")
def check_what_is_refused():
    with pytest.raises(UnsupportedByEmulation, match="rows of 15 numbers"):
        moe_permute(torch.randn(4, 15), torch.zeros(4, 1, dtype=torch.int32), 4, map_type="index")
    if importlib.util.find_spec("triton") is None:
        with pytest.raises((UnsupportedByEmulation, AttributeError)):
            moe_permute(torch.randn(4, 16), torch.ones(4, 1, dtype=torch.int32), 4)


def recorded(name, dtype, m=24):
    """The calls of operators in one step of the model."""
    spec = Spec(
        recipe="te.experts", model=name, m=m, k=20, n=24, dtype="bf16" if dtype == BF16 else "fp32"
    )
    model = MODELS[name].build(spec, dtype=dtype, device="cuda" if real_extension() else "cpu")
    x = torch.randn(m, 20, dtype=dtype, requires_grad=True)
    with EagerWatch() as watch:
        y = model(x)
        y.backward(torch.randn(y.shape, dtype=dtype))
    calls = operators_of(watch.operators)
    assert not [words for words in watch.unjudged if "TransformerEngine" in words]
    return [call for call in calls if call.operator in (MODELS[name].operators or ())]


@each_model
def check_text_of_a_model_builds_the_same(name):
    spec = Spec(recipe="te.experts", model=name, m=24, k=20, n=24, dtype="fp32")
    device = "cuda" if real_extension() else "cpu"
    ours = MODELS[name].build(spec, dtype=torch.float32, device=device)
    imports = "import torch\nfrom typing import Any\nfrom torch import nn\n"
    imports += "import torch.nn.functional as F\n"
    namespace = {}
    text = f"{imports}{model_source(name)}\nmodel = {MODELS[name].expression(spec)}"
    exec(text, namespace)
    theirs = namespace["model"].to(device)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(24, 20, device=device)
    assert torch.equal(ours(x), theirs(x))


@each_model
@each_dtype
def check_what_is_right_is_inside_the_bounds(name, dtype):
    calls = recorded(name, dtype)
    assert {call.operator for call in calls} == MODELS[name].operators
    for call in calls:
        named = {*BY_NAME[call.operator].results} - {"map"}
        named -= {"moved", "grad_probs"} - {*call.outputs}  # of calls without weights
        said = judge_call("eager", call)
        assert {*BY_NAME[call.operator].expected(call)} >= named & {*call.outputs}
        assert not [v for v in said if v.status != "ok"], said


@each_model
def check_what_is_wrong_is_seen(name):
    """One changed element of each result, and a result of the row before."""
    for call in recorded(name, torch.float32):
        for result, x in call.outputs.items():
            if result == "map":
                continue
            for change in ("element", "row"):
                wrong = np.array(x)
                if change == "element":
                    at = np.unravel_index(np.abs(wrong).argmax(), wrong.shape)
                    wrong[at] = wrong[at] * 1.001 + (wrong[at] == 0.0)
                elif wrong.ndim:
                    wrong = np.roll(wrong, 1, 0)
                if np.array_equal(wrong, x):
                    continue
                changed = replace(call, outputs={**call.outputs, result: wrong})
                said = {v.status for v in judge_call("eager", changed)}
                assert "diverged" in said, (call.operator, result, change)


def said_of(run):
    """The calls of operators in ``run``, and what is said of them."""
    with EagerWatch() as watch:
        run()
    calls = [call for call in operators_of(watch.operators) if call.operator.startswith("te_")]
    return calls, [verdict for call in calls for verdict in judge_call("eager", call)]


@pytest.mark.parametrize(
    ("dtype", "rows", "weights", "grads"),
    [
        (FP16, 1.0, 1e-4, 1e-3),  # weights and products below the smallest normal number
        (FP16, 1e-3, 1.0, 1e-3),
        (FP16, 2e4, 1.0, 1e4),  # sums and products above the largest
        (FP16, 0.5, 2e5, 1e-2),  # weights above it
        (BF16, 1e10, 1e-39, 1e10),
        (torch.float32, 1e10, 1e-39, 1e10),
    ],
)
def check_numbers_that_leave_the_range_of_the_dtype(dtype, rows, weights, grads):
    def run():
        x = (torch.randn(32, 64) * rows).to(dtype).requires_grad_()
        index = torch.stack([torch.randperm(8)[:4] for _ in range(32)]).int()
        weight = (torch.rand(32, 4) * weights).requires_grad_()
        sent, places = moe_permute(x, index, 0, map_type="index")
        back = moe_unpermute(sent, places, weight, map_type="index")
        back.backward((torch.randn(32, 64) * grads).to(dtype))

    calls, said = said_of(run)
    assert len(calls) == 4
    assert not [verdict for verdict in said if verdict.status == "diverged"], said


def check_so_many_narrow_sums_are_not_known():
    index = torch.arange(300, dtype=torch.int32)[None]
    rows = torch.randn(300, 8, dtype=BF16)
    calls, said = said_of(
        lambda: moe_unpermute(rows, index[0], torch.ones(1, 300), map_type="index")
    )
    expected = BY_NAME[calls[0].operator].expected(calls[0])["output"]
    assert expected.unknown.all()
    assert not [verdict for verdict in said if verdict.status == "diverged"], said


def check_calls_without_tokens_and_with_masks_of_bytes():
    none = torch.zeros(0, 2, dtype=torch.int32)
    calls, _ = said_of(lambda: moe_permute(torch.randn(0, 16), none, 0, map_type="index"))
    assert not calls
    read = BY_NAME["te_permute_mask_map_fwd"].read
    rows, mask = torch.randn(2, 16), torch.eye(2, dtype=torch.bool)
    given = {"inp": rows, "routing_map": mask, "probs": None, "pad_offsets": None}
    assert read(given, (rows, torch.zeros(2, 5, dtype=torch.int32), torch.empty(0))) is not None
    quantised = rows.to(torch.float8_e4m3fn)
    with pytest.raises(Unjudged, match="quantised"):
        read(given | {"inp": quantised}, (quantised, mask.int(), torch.empty(0)))


def check_gradients_of_shares_in_a_tiny_sum():
    """The square of the sum of scores is below fp32's normal numbers: nothing is known."""
    x = torch.full((4, 8), -45.0).requires_grad_()

    def run():
        probs, _ = fused_topk_with_score_function(
            x, 2, False, None, None, None, "sigmoid", torch.linspace(0.0, 1e-25, 8)
        )
        probs.backward(torch.rand(4, 8) * 1e-12)

    calls, said = said_of(run)
    expected = BY_NAME["te_router"].expected(calls[0])["grad_input"]
    routed = calls[0].outputs["chosen"] != 0.0
    wide = expected.radius > 1e-3 * np.abs(expected.centre)
    assert (expected.unknown | wide)[routed].all()
    assert not [verdict for verdict in said if verdict.status == "diverged"], said


def check_number_of_experts_of_strange_rows_is_not_known():
    x = torch.randn(4, 8)
    x[1, 3], x[2, 0] = torch.nan, -torch.inf
    for bias in (None, torch.zeros(8), torch.tensor([-torch.inf] * 7 + [0.0])):
        kind = "softmax" if bias is None else "sigmoid"
        given = (x, 2, False, None, None, None, kind, bias)
        calls, said = said_of(lambda given=given: fused_topk_with_score_function(*given))
        unknown = BY_NAME["te_router"].expected(calls[0])["count"].unknown
        finite = bias is None or bool(bias.isfinite().all())
        assert unknown.tolist() == [not finite, True, True, not finite]
        assert not [verdict for verdict in said if verdict.status == "diverged"], said


@pytest.mark.parametrize("name", [name for name in HERE if name.endswith(("softmax", "dropping"))])
def check_a_row_with_fewer_experts_runs_through_the_model(name, monkeypatch):
    from transformer_engine.pytorch import router

    def once(*given, **how):
        probs, chosen = fused_topk_with_score_function(*given, **how)
        chosen[0] = torch.arange(chosen.shape[1]) == 0
        return probs, chosen

    monkeypatch.setattr(router, "fused_topk_with_score_function", once)
    spec = Spec(recipe="te.experts", model=name, m=24, k=20, n=24, dtype="fp32")
    model = MODELS[name].build(spec, dtype=torch.float32, device="cpu")
    assert model(torch.randn(24, 20)).shape == (24, 20)


@pytest.mark.parametrize(
    ("topk", "groups", "of_them", "words"),
    [
        (3, 4, 2, "topk must be divisible by group_topk"),
        (4, 1, 2, "group_topk must be <= num_groups"),
        (4, 5, 2, "num_experts must be divisible by num_groups"),
        (16, 8, 2, "per-group topk must be <= group size"),
    ],
)
def check_groups_that_do_not_fit(topk, groups, of_them, words):
    with pytest.raises(RuntimeError, match=words):
        fused_topk_with_score_function(
            torch.randn(2, 16), topk, False, groups, of_them, None, "sigmoid", None
        )


def check_auxiliary_loss_of_many_tokens():
    probs = torch.rand(64, 32, requires_grad=True)
    counts = torch.randint(0, 100, (32,))

    def run(tokens, coefficient):
        fused_moe_aux_loss(probs, counts, tokens, 32, 3, coefficient).backward()

    for tokens in (2**24 + 1, 33554435, 3, 12345):
        for coefficient in (0.1, 1 / 3, 1e-33, 1e-7):
            calls, said = said_of(lambda t=tokens, c=coefficient: run(t, c))
            assert calls
            assert not [verdict for verdict in said if verdict.status == "diverged"], said


def check_scores_of_float64_are_refused():
    with pytest.raises(RuntimeError, match="dtype"):
        fused_compute_score_for_moe_aux_loss(torch.randn(2, 4).double(), 2, "sigmoid")


def check_auxiliary_losses_add_up_in_any_order_on_a_gpu():
    for rows, unordered in ((2, False), (3, True)):
        counts = torch.tensor([1, 1])
        calls, _ = said_of(
            lambda n=rows, c=counts: fused_moe_aux_loss(torch.rand(n, 2), c, n, 2, 1, 0.5)
        )
        operator = BY_NAME[calls[0].operator]
        assert operator.unordered(replace(calls[0], device="cuda")) == unordered
        assert not operator.unordered(replace(calls[0], device="cpu"))


def check_places_outside_of_the_rows_are_not_judged():
    rows, places = torch.randn(4, 16), torch.arange(4, dtype=torch.int32)
    calls, _ = said_of(lambda: moe_unpermute(rows, places, torch.ones(4, 1), map_type="index"))
    (call,) = calls
    for place in (4.0, -2.0):
        moved = np.array([0.0, 1.0, place, 3.0], np.float32)
        outside = replace(call, tensors={**call.tensors, "places": moved})
        with pytest.raises(Unjudged, match="outside of the rows"):
            BY_NAME[call.operator].expected(outside)
        assert "diverged" not in {verdict.status for verdict in judge_call("eager", outside)}
    call = replace(call, operator="te_permute_mask_map_fwd", settings={"rows": 3})
    full = replace(call, tensors={"input": rows.numpy(), "mask": np.ones((4, 1), np.float32)})
    with pytest.raises(Unjudged, match="more rows than the result has"):
        BY_NAME[full.operator].expected(full)


@pytest.mark.parametrize("name", [name for name in HERE if "mask" not in name])
@pytest.mark.parametrize(("m", "k"), [(0, 20), (1, 1), (5, 0), (0, 0)])
def check_sizes_of_0_and_1(name, m, k):
    spec = Spec(recipe="te.experts", model=name, m=m, k=k, n=1, dtype="fp32")
    device = "cuda" if real_extension() else "cpu"
    model = MODELS[name].build(spec, dtype=torch.float32, device=device)
    x = torch.randn(m, k, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (m, k)


@pytest.mark.parametrize(
    ("imported", "interprets", "refused"),
    [(False, "", True), (True, "", True), (True, "1", False), (False, "1", True)],
)
def check_only_an_interpreted_triton_moves_tokens(imported, interprets, refused, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interprets)
    if imported:
        monkeypatch.setitem(sys.modules, "triton", sys)
    else:
        monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert ("transformer_engine.pytorch.triton.permutation" in refused_modules()) == refused
    assert "transformer_engine.pytorch.onnx_extensions" in refused_modules()
