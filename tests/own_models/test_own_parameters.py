"""Parameters of a user's own model that are tied, shared, unused, frozen, idle or cached."""

from __future__ import annotations

import pytest
from narrowfuzz.arms.model_names import gradient_names, ties
from narrowfuzz.case.events import Backward, Forward, Step
from narrowfuzz.judge.judge import Judge
from narrowfuzz.own_models import register
from narrowfuzz.trace.expect import Present
from narrowfuzz.triage.triage import triage
from narrowfuzz.triage.verify import RunScript
from samples import of_operators
from test_own_causes import MX, PARTS, ROWWISE, TENSORWISE, causes, entries, judged, one
from test_own_models import RECIPES, Own, case_of, own

__all__ = ["own"]  # a fixture

# Parameters and modules with two names.


@pytest.mark.one_in(3)
@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("recipe", ["torch.bf16", ROWWISE])
def test_a_tied_head_is_one_parameter(own: Own, recipe: str, head_first: bool) -> None:
    text = own(
        PARTS + f"def build(): return ids(LM(Block(), tied=True, head_first={head_first}))\n"
    )
    case = case_of(register(text)[0], recipe, steps=2, optimizer="adamw", checkpoint="full")
    assert not Judge(RECIPES, of_operators()).judge(case).causes
    names = ["model.head.weight", "model.tokens.weight"]
    first, second = names if head_first else names[::-1]
    assert ties(case.spec) == {second: first}
    assert {f"{n}.grad" for n in names} & gradient_names(case.spec) == {f"{first}.grad"}


def test_a_wrapper_that_unties_is_known_and_hides_nothing(own: Own) -> None:
    text = own(PARTS + "def build(): return ids(LM(Block(), tied=True))\n")
    found = judged(text, MX, backend="wrapper", steps=2)
    assert causes(found) == [("census", "tied weights untied")]
    found = judged(text, MX, backend="wrapper", steps=2, known=True)
    assert not found.causes and entries(found) == {"mx-wrapper-unties-weights"}
    lost = (
        PARTS
        + """
class Detached(LM):
    def forward(self, ids):
        with torch.no_grad():
            x = self.tokens(ids)
        return self.head(self.layers[0](x))
def build():
    return ids(Detached(Block()))
"""
    )
    # an embedding whose table gets no gradient is no business of the wrapper's, nor the wrapper its
    assert not judged(own(lost, name="other.py"), MX, backend="wrapper").causes


@pytest.mark.one_in(4)
@pytest.mark.parametrize("checkpoint", ["none", "full", "selective"])
@pytest.mark.parametrize("recipe", ["torch.bf16", ROWWISE])
def test_a_block_that_is_called_twice_is_recomputed_as_it_was(
    own: Own, recipe: str, checkpoint: str
) -> None:  # fmt: skip
    """The last call is recomputed first."""
    text = own(PARTS + "block = Block()\ndef build(): return ids(LM(block, block))\n")
    assert not judged(text, recipe, checkpoint=checkpoint, steps=2).causes


TWICE = """
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(D, D)
        self.second = self.first
        self.third = nn.Linear(D, D)
        self.fourth = nn.Linear(D, D)
        self.fourth.weight = self.third.weight
    def forward(self, x):
        x = F.relu_(self.second(F.gelu(self.first(x))))
        return self.fourth(F.gelu(self.third(x)))
def build(): return rows(Twice())
"""


def test_a_linear_under_two_names_is_known_and_its_gradient_is_not_said_to_be_wrong(
    own: Own,
) -> None:
    text = own(PARTS + TWICE)
    assert not judged(text).causes
    assert causes(judged(text, ROWWISE)) == [("census", "second name left unconverted")]
    known = judged(text, ROWWISE, known=True)
    assert not known.causes
    assert {v.explained_by for v in known.known} == {"float8-linear-registered-twice"}


# Gradients that are not there.

EXPERTS = """
class Experts(nn.Module):
    def __init__(self, count, chosen="weight"):
        super().__init__()
        self.gate = nn.Linear(D, count, bias=False)
        self.experts = nn.ModuleList(MLP() for _ in range(count))
    def forward(self, x):
        flat = x.reshape(-1, D)
        weights, chosen = self.gate(flat).float().softmax(-1).to(x.dtype).max(-1)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            mine = (chosen == i).nonzero().squeeze(-1)
            if len(mine):
                y = y.index_add(0, mine, expert(flat[mine]) * weights[mine, None])
        return y.view_as(x)
def build(): return Experts(12).to(torch.bfloat16), torch.zeros(1, 8, D, dtype=torch.bfloat16)
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", ["torch.bf16", ROWWISE, TENSORWISE])
def test_an_expert_without_tokens_is_no_finding(own: Own, recipe: str) -> None:
    text = own(PARTS + EXPERTS)
    judge = Judge(RECIPES, of_operators())
    case = case_of(register(text)[0], recipe, checkpoint="full")
    evidence = judge.observe(case)
    idle = evidence.gradients - set(evidence.traces["eager"].outputs)
    assert idle, "with 8 rows there are idle ones among 12 experts"
    assert not judge.judge(case).causes


@pytest.mark.parametrize(
    "change",
    [
        "model.unused = nn.Linear(D, D)",
        "model.up.requires_grad_(False)",
        "model.requires_grad_(False); model.down.weight.requires_grad_(True)",
    ],
)
def test_an_unused_branch_and_frozen_parameters_are_no_finding(own: Own, change: str) -> None:
    text = own(PARTS + f"def build():\n    model = MLP()\n    {change}\n    return rows(model)\n")
    for recipe in ("torch.bf16", ROWWISE):
        assert not judged(text, recipe, steps=2).causes


CACHED = """
class Cached(nn.Linear):
    kept = None
    def forward(self, x):
        if self.kept is None:
            self.kept = self.weight.detach().to(x.dtype)
        return F.linear(x, self.kept)
def build():
    block = Block()
    block.mlp.down = Cached(2 * D, D, bias=False)
    return rows(block)
"""


def test_a_weight_that_is_cached_over_steps_is_found_at_its_layer(
    own: Own, scripts: RunScript
) -> None:
    """The model unconverted has no gradient there, either: it is the model's own loss."""
    judge = Judge(RECIPES, of_operators())
    events = (Forward(), Backward(of=(0,)), Step(), Forward(), Backward(of=(1,)))
    case = case_of(register(own(PARTS + CACHED))[0], events=events)
    verdict = one(judge.judge(case), "contract")
    assert verdict.expect == Present(("model.mlp.down.weight.grad",))
    assert triage(judge, case, verdict, seconds=2.0, scripts=scripts).confirmed


CASTS = """
class Casts(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))
def build():
    block = Block()
    block.mlp.down = Casts(2 * D, D, bias=False)
    return rows(block)
"""


def test_products_of_a_linear_with_a_forward_of_its_own_are_judged(own: Own) -> None:
    """Those of its backward, too; nn.Linear's are judged as layers."""
    judgement = judged(own(PARTS + CASTS))
    found = [v for v in judgement.verdicts if v.rule == "O25" and v.role == "mm"]
    assert [v.status for v in found] == ["ok"] * 3
    assert not judgement.causes
