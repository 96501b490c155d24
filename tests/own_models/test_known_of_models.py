"""What is found out about a user's model, so that known issues that it cannot show are not
listed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from narrowfuzz.models.model import FINITE_MASK, WRITTEN_PRODUCT
from narrowfuzz.own_models import register
from narrowfuzz.own_models.affected import _Affected
from test_own_causes import judged

HEAD = "import torch, torch.nn.functional as F\nfrom torch import nn\n"
Own = Callable[..., str]


@pytest.fixture
def own(tmp_path: Path) -> Own:
    def write(source: str) -> str:
        (tmp_path / "mine.py").write_text(HEAD + source)
        return f"{tmp_path / 'mine.py'}:build"

    return write


@pytest.mark.parametrize(
    ("layer", "derived"),
    [
        ("nn.Linear(8, 8)", False),
        ("nn.MultiheadAttention(8, 2)", False),  # torch's own subclass, which changes nothing
        ("torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))", False),
        ("Own(8, 8)", True),
        ("torch.nn.utils.parametrizations.weight_norm(Own(8, 8))", True),
    ],
)
def test_classes_derived_from_linear_are_known(own: Own, layer: str, derived: bool) -> None:
    source = (
        "class Own(nn.Linear): pass\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        f"        super().__init__(); self.first, self.second = nn.Linear(8, 8), {layer}\n"
        "    def forward(self, x):\n"
        "        y, *given = self.first(x), *[x] * 2 * isinstance(self.second, "
        "nn.MultiheadAttention)\n"
        "        y = self.second(y, *given)\n"
        "        return y[0] if given else y\n"
        "def build(): return Model(), torch.ones(4, 8)\n"
    )
    modules = register(own(source))[0].modules
    assert modules is not None and "Linear" in modules
    assert ("subclass of Linear" in modules) is derived


@pytest.mark.parametrize("second", ["nn.Linear(8, 8)", "self.first"])
def test_a_linear_of_several_names_is_known(own: Own, second: str) -> None:
    source = (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first = nn.Linear(8, 8)\n"
        f"        self.second = {second}\n"
        "    def forward(self, x): return self.second(self.first(x))\n"
        "def build(): return Model(), torch.ones(4, 8)\n"
    )
    modules = register(own(source))[0].modules
    assert modules is not None
    assert ("Linear of several names" in modules) is (second == "self.first")


@pytest.mark.parametrize("also", ["", "tie", "hook", "attribute"])
def test_what_a_parameter_has_besides_its_numbers_is_known(own: Own, also: str) -> None:
    more = {
        "": "pass",
        "tie": "self.second.weight = self.first.weight",
        "hook": "self.first.weight.register_hook(lambda grad: grad * 0.5)",
        "attribute": "self.first.weight.sharded = True",
    }
    source = (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)\n"
        f"        {more[also]}\n"
        "    def forward(self, x): return self.second(self.first(x))\n"
        "def build(): return Model(), torch.ones(4, 8)\n"
    )
    parts = register(own(source))[0].modules
    assert parts is not None
    assert ("tied parameter" in parts) is (also == "tie")
    assert ("parameter with hooks or attributes" in parts) is (also in ("hook", "attribute"))


@pytest.mark.parametrize(
    ("first", "computed"),
    [
        ("nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))", True),
        ("nn.utils.weight_norm(nn.Linear(8, 8))", True),
        ("nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 1)))", False),
        ("frozen(nn.Linear(8, 8))", False),
    ],
)
def test_a_weight_that_is_computed_is_known(own: Own, first: str, computed: bool) -> None:
    source = (
        "def frozen(linear):\n"
        "    weight = linear.weight.detach()\n"
        "    del linear.weight\n"
        "    linear.register_buffer('weight', weight)\n"
        "    return linear\n"
        f"def build(): return nn.Sequential({first}, nn.Linear(8, 8)), torch.ones(4, 8)\n"
    )
    model = register(own(source))[0]
    assert model.modules is not None
    assert ("Linear with a computed weight" in model.modules) is computed
    assert model.computed_weights == ("model.0",) * computed


WORDS = """
class Words(nn.Module):
    def __init__(self, table, rest, norm, attend=""):
        super().__init__()
        self.table, self.up = nn.Embedding(16, 64).to(table), nn.Linear(64, 64).to(rest)
        self.norm, self.attend = nn.LayerNorm(64).to(norm), attend
        cut = torch.ones(8, 8).tril().bool()
        self.masks = {
            "bool": cut, "float": torch.zeros(8, 8).masked_fill(~cut, -1e9),
            "inf": torch.zeros(8, 8).masked_fill(~cut, float("-inf")), "plain": None,
            "padded": (1.0 - cut.float()) * torch.finfo(fp32).min,
            "unpadded": (1.0 - torch.ones(8, 8)) * torch.finfo(fp32).min, "open": cut | True,
        }
    def forward(self, ids):
        h = self.up(self.table(ids).to(self.up.weight.dtype))
        if self.attend:
            h = h.unsqueeze(1)
            h = F.scaled_dot_product_attention(h, h, h, self.masks[self.attend]).squeeze(1)
        if self.up.weight.dtype != fp32:
            h = h.to(self.norm.weight.dtype)
        return self.total(self.norm(h))
    def total(self, h): return h
class Summed(Words):
    def total(self, h): return h.sum()
class Frozen(Words):
    def __init__(self, *dtypes):
        super().__init__(*dtypes)
        self.norm.weight.requires_grad_(False), self.norm.bias.requires_grad_(False)
fp32, bf16 = torch.float32, torch.bfloat16
def build(): return """
#: Of these deviations those that may affect a model: an expression for it, and the batch.
MAY_BE_AFFECTED = {
    "Words(fp32, fp32, fp32)": (64, {"layer_norm_narrow_sums"}),  # under autocast
    "Words(bf16, bf16, bf16)": (64, {"layer_norm_narrow_sums", "embedding_narrow_sums"}),
    "Words(fp32, bf16, fp32)": (64, set()),
    "Words(bf16, fp32, fp32)": (64, {"layer_norm_narrow_sums", "embedding_narrow_sums"}),
    "Frozen(bf16, bf16, bf16)": (64, {"embedding_narrow_sums"}),  # the norm's parameters are frozen
    "Summed(fp32, bf16, fp32)": (64, set()),  # which adds up in fp32
    "Summed(fp32, bf16, bf16)": (64, {"layer_norm_narrow_sums", "sum_narrow_parts"}),
    "Summed(fp32, bf16, bf16) ": (8, {"layer_norm_narrow_sums"}),  # too few for several threads
}


@pytest.mark.parametrize("made", MAY_BE_AFFECTED)
def test_deviations_are_known_by_the_dtypes_and_sizes_of_calls(own: Own, made: str) -> None:
    batch, affected = MAY_BE_AFFECTED[made]
    model, *_ = register(own(f"{WORDS}{made}, torch.arange({batch} * 8).reshape(-1, 8) % 16\n"))
    every = {"layer_norm_narrow_sums", "embedding_narrow_sums", "sum_narrow_parts"}
    assert model.affected is not None and model.affected & every == affected


@pytest.mark.parametrize(
    ("mask", "may_add"),
    [
        ("", False),
        ("plain", False),
        ("bool", False),
        ("open", False),
        ("inf", False),
        ("float", True),
        ("padded", True),
        ("unpadded", True),
    ],
)
def test_attention_with_a_finite_mask_is_known(own: Own, mask: str, may_add: bool) -> None:
    made = f"Words(fp32, fp32, fp32, {mask!r}), torch.arange(32).reshape(-1, 8) % 16\n"
    (model,) = register(own(WORDS + made))
    assert model.affected is not None and model.operators is not None
    assert ("attention" in model.operators) is bool(mask)
    assert (FINITE_MASK in model.affected) is may_add


@pytest.mark.parametrize(
    ("forward", "writes"),
    [
        ("return self.narrow(x) * 2", False),
        ("y = x.clone(); y *= 2; return self.narrow(y)", False),
        ("y = x @ x.mT; y += 1; return self.narrow(y @ x)", False),  # attention's scores
        ("y = self.narrow(x); y = y * 2; y += x; return y", False),
        ("y = self.narrow(x); y *= 2; return y", True),
        ("return torch.nn.functional.relu_(self.wide(x).unflatten(0, (2, -1))[1])", True),
        ("y = x @ self.narrow.weight; y += x; return y", True),
        ("y = self.narrow(x.detach()).detach(); torch.add(y, 1, out=y); return x + y", True),
    ],
)
def test_a_product_that_is_written_in_place_is_known(own: Own, forward: str, writes: bool) -> None:
    source = (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.narrow, self.wide = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)\n"
        f"    def forward(self, x): {forward}\n"
        "def build(): return Model(), torch.ones(4, 5, 8)\n"
    )
    (model,) = register(own(source))
    assert model.affected is not None
    assert (WRITTEN_PRODUCT in model.affected) is writes


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_of_zeros_counts_unless_it_is_made_of_a_boolean_one(own: Own, kind: str) -> None:
    """nn.MultiheadAttention makes zeros of a boolean mask that excludes nothing."""
    source = (
        "class Model(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.attend = nn.MultiheadAttention(8, 2)\n"
        "    def forward(self, x):\n"
        f"        mask = torch.zeros(5, 4, dtype=torch.{kind})\n"
        "        return self.attend(x, x, x, mask, need_weights=False)[0]\n"
        "def build(): return Model(), torch.ones(4, 5, 8)\n"
    )
    (model,) = register(own(source))
    assert model.affected is not None
    assert (FINITE_MASK in model.affected) is (kind == "float")


@pytest.mark.parametrize(
    ("mask", "may_add"),
    [(torch.full((4, 4), -1e9), True), (torch.ones(4, 4).bool(), False), (None, False)],
)
def test_a_mask_is_found_where_it_is_given_by_position(mask: Any, may_add: bool) -> None:
    """As to a GPU's kernels, and to the function in inference mode."""
    q = torch.ones(1, 1, 4, 8)
    with torch.inference_mode(), _Affected() as kernels:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, mask)
    assert (FINITE_MASK in kernels.names) is may_add


def test_nothing_is_known_of_a_model_that_autocast_breaks(own: Own) -> None:
    """A run may be under autocast, and whatever may affect its calls then is listed."""
    broken = WORDS.replace("if self.attend", "assert h.dtype == fp32\n        if self.attend")
    made = "Words(fp32, fp32, fp32), torch.arange(32).reshape(-1, 8) % 16\n"
    assert register(own(broken + made))[0].affected is None


#: Compiled, the gradients of all parameters are twice those of eager.
DOUBLED = """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(4, 32), nn.Linear(32, 32, bias=False)
    def forward(self, ids):
        y = self.up(self.embed(ids))
        return y + (y - y.detach()) if torch.compiler.is_compiling() else y
def build():
    torch.manual_seed(0)
    return Words().bfloat16(), torch.arange(256) % 4
"""


def test_what_is_known_of_a_gradient_in_both_arms_hides_no_difference_between_them(
    own: Own,
) -> None:
    source = DOUBLED.replace("self.up(self.embed(ids))", "self.embed(ids)")
    found = judged(own(source), compile="aot_eager", known=True)
    assert {v.explained_by for v in found.known} == {"embedding-narrow-sums"}
    (verdict,) = found.causes
    assert (verdict.rule, verdict.arm) == ("O8", "aot_eager")
    assert verdict.at.name == "model.embed.weight.grad"


def test_what_is_known_of_one_gradient_hides_no_difference_of_others(own: Own) -> None:
    """The sums of the embedding's gradient are narrow, in eager as well as compiled."""
    found = judged(own(DOUBLED), compile="aot_eager", known=True)
    assert {v.explained_by for v in found.known} == {"embedding-narrow-sums"}
    (verdict,) = found.causes
    assert (verdict.rule, verdict.arm) == ("O8", "aot_eager")
    assert verdict.at.name == "model.up.weight.grad"
