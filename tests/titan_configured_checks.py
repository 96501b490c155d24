"""What runs over torchtitan 0.3 alone: its converters build a decoder anew (test_torchtitan.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.recipe.recipe import load_recipes, obstacles, with_filter
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

RECIPES = {n: r for n, r in load_recipes().items() if n.startswith("torchtitan.")}
BLOCK = Spec(recipe="torchtitan.mxfp8", model="titan_8b", m=128, k=512, n=2048)


def built(spec: Spec = BLOCK) -> nn.Module:
    return MODELS[spec.model].build(spec, dtype=torch.bfloat16, device="cpu")


def converted(model: nn.Module, name: str) -> set[str]:
    """Names of the layers that a recipe has converted."""
    recipe = RECIPES[name.partition("@")[0]]
    recipe = with_filter(recipe, name.partition("@")[2]) if "@" in name else recipe
    is_one: Any = recipe.converted
    before = {n for n, m in model.named_modules() if recipe.convertible(m, n, BLOCK)}
    model = recipe.convert(model, BLOCK)
    now = {n for n, m in model.named_modules() if is_one(m)}
    assert now == before
    return {n.removeprefix("model.layers.0.").removeprefix("model.") for n in now}


def check_recipes_are_those_of_its_converters() -> None:
    assert {name.removeprefix("torchtitan.") for name in RECIPES} == {
        f"{name}{which}" for name in ("mxfp8", "float8.rowwise", "float8.rowwise_gw_hp")
        for which in ("", ".partial")
    }  # fmt: skip
    assert not any(obstacles(recipe, "cpu") for recipe in RECIPES.values())


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("torchtitan.mxfp8", set()),
        ("torchtitan.mxfp8.partial", {"lm_head"}),
        ("torchtitan.mxfp8@!wo", {"attention.wo"}),
        ("torchtitan.float8.rowwise", set()),
        ("torchtitan.float8.rowwise.partial", {"lm_head"}),
        ("torchtitan.float8.rowwise_gw_hp@!lm_head,!w2", {"lm_head", "feed_forward.w2"}),
    ],
)
def check_layers_are_named_as_it_wants_them(name: str, left_out: set[str]) -> None:
    every = {
        "attention.qkv_linear.wqkv", "attention.wo", "feed_forward.w1", "feed_forward.w2",
        "feed_forward.w3", "lm_head",
    }  # fmt: skip
    assert converted(built(), name) == every - left_out


def check_naming_no_layer_converts_none() -> None:
    assert not converted(built(), "torchtitan.mxfp8@nothing")
    assert not converted(built(), "torchtitan.float8.rowwise@nothing")


@pytest.mark.parametrize("name", ["torchtitan.mxfp8", "torchtitan.float8.rowwise"])
def check_a_decoder_built_anew_has_the_same_state_and_layout(name: str) -> None:
    model = built()
    before = dict(model.named_parameters())
    tables = dict(model.named_buffers())
    layouts = {n: m._sharding_config for n, m in model.named_modules() if n.startswith("model")}
    after = RECIPES[name].convert(model, BLOCK)
    assert all(p is before[n] for n, p in after.named_parameters())
    assert all(b is tables[n] and b.is_complex() for n, b in after.named_buffers())
    for n, m in after.named_modules():
        assert not n.startswith("model") or m._sharding_config == layouts[n], n


def check_a_model_without_a_decoder_is_refused() -> None:
    for recipe in RECIPES.values():
        with pytest.raises(ValueError, match=r"only linears inside .* proj is in none"):
            recipe.convert(nn.ModuleDict({"proj": nn.Linear(32, 32)}), BLOCK)


@pytest.mark.parametrize(("model", "hidden"), [("titan_8b", 1792), ("titan_405b", 1664)])
def check_blocks_have_the_proportions_that_they_have_in_older_releases(
    model: str, hidden: int
) -> None:
    block: Any = built(Spec(recipe=BLOCK.recipe, model=model, m=128, k=512, n=2048))
    shapes = {n.rpartition("0.")[2]: (*p.shape,) for n, p in block.model.layers.named_parameters()}
    assert shapes["attention.qkv_linear.wqkv.weight"] == (768, 512)  # 16 heads, 4 of keys
    assert shapes["feed_forward.w1.weight"] == (hidden, 512)


def check_its_attention_is_the_one_that_it_replaces() -> None:
    """On one document: FlexAttention's forward runs here, uncompiled."""
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    q, k, v = (torch.randn(2, 128, heads, 32) for heads in (16, 4, 4))
    causal: BlockMask = create_block_mask(
        lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu"
    )
    theirs = FlexAttention.Config().build()
    ours = ScaledDotProductAttention.Config().build()
    eager = FlexAttention._compiled_flex_attn
    FlexAttention._compiled_flex_attn = flex_attention
    try:
        expected = theirs(q, k, v, attention_masks=causal, enable_gqa=True)
    finally:
        FlexAttention._compiled_flex_attn = eager
    torch.testing.assert_close(ours(q, k, v, enable_gqa=True), expected)
