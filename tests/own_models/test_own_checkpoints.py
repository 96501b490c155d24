"""Checkpoints of users' models that write in place, or keep something outside their blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from narrowfuzz.campaign.check import _configuration, _specs
from narrowfuzz.campaign.check_head import head
from narrowfuzz.campaign.run_options import RunOptions
from narrowfuzz.case.arm import EAGER, with_checkpoint
from narrowfuzz.case.spec import Case, DataSpec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import load_ledger
from narrowfuzz.own_models import register
from narrowfuzz.plants.registry import planted
from narrowfuzz.recipe.recipe import Recipe, load_recipes
from narrowfuzz.report.judged import blocked_arms, judged, judged_layers
from narrowfuzz.rules.contract import CHANGED_IN_PLACE
from narrowfuzz.trace.verdict import Verdict
from torch import nn

PAGES = Path(__file__).resolve().parents[1] / "own_models"
RECIPES = load_recipes()
ARM = with_checkpoint(EAGER, "selective").name


def contract(page: str, recipe: Any) -> tuple[Verdict, tuple[Verdict, ...]]:
    """What the contract says of the page's selective checkpoint, and what is reported."""
    model = register(f"{PAGES / page}")[0]
    spec = _specs(model, [recipe], "none", "selective")[0]
    judge = Judge({recipe.name: recipe}, load_ledger())
    judgement = judge.judge(Case(spec=spec, data=DataSpec()))
    (said,) = (v for v in judgement.verdicts if v.rule == "contract" and v.arm == ARM)
    return said, tuple(judgement.causes)


def test_a_model_that_does_so_is_refused_and_the_reason_is_said() -> None:
    said, causes = contract("inplace_relu.py:build", RECIPES["torch.fp32"])
    assert not causes
    assert (said.status, said.why) == ("not_applicable", CHANGED_IN_PLACE)
    assert blocked_arms([said], "torch.fp32", "m") == {
        ("blocked", "torch.fp32", ARM, "m", CHANGED_IN_PLACE)
    }


def test_a_conversion_that_does_so_is_reported() -> None:
    plain = RECIPES["torch.fp32"]
    assert isinstance(plain, Recipe)

    def converted(model: nn.Module, spec: Any) -> nn.Module:
        def changed(module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
            return output.mul_(2)

        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(changed)
        return model

    said, causes = contract("gradient_reversal.py:build", replace(plain, convert=converted))
    assert said.status == "crashed"
    assert said in causes


BLOCKS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x, memory):
        {body}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        memory = {{}}
        with torch.autocast("cpu", enabled={autocast}):
            for layer in self.layers:
                x = layer(x, memory)
        return x

def build():
    return Model(), torch.randn(4, 16)
"""
#: What a block does, and whether it alone can be recomputed.
BODIES = {
    "a cache of keys": ("memory[self] = torch.cat([*memory.get(self, ()), x]); "
                        "return self.up(memory[self]).sum(0) + x", False),
    "a second call raises": ("assert self not in memory; memory[self] = x; "
                             "return self.up(x)", False),
    "operators alone": ("memory[self] = torch.cat([*memory.get(self, ()), x]); "
                        "return self.up(memory[self][: len(x)])", False),
    "what cannot be watched": ("from torch.utils import _python_dispatch as d; "
                               "modes = d._get_current_dispatch_mode_stack(); "
                               "assert '_Operators' not in map(lambda m: type(m).__name__, modes);"
                               "return self.up(x)", True),
    "dropout": ("return nn.functional.dropout(self.up(x), 0.5)", True),
    "its input in place": ("x += 1; return self.up(x)", True),  # the rules see what that does
    "a value that is computed once": ("return self.up(x) * memory.setdefault(self, 2)", True),
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("body", "alone"), BODIES.values(), ids=[*BODIES])
def test_a_block_that_keeps_something_is_no_checkpoint_of_its_own(
    tmp_path: Path, body: str, alone: bool
) -> None:
    (tmp_path / "mine.py").write_text(BLOCKS.format(body=body, autocast=False))
    options = RunOptions(models=(f"{tmp_path / 'mine.py'}:build",), recipes=("torch.fp32",))
    one = _configuration(options, "cpu", "none", "full", ())
    model = one.model
    assert model.unrepeatable == ("" if alone else "model.layers.0")
    assert model.regions == (("model.layers.0", "model.layers.1") if alone else ())
    assert ("checkpointed as a whole" in head(one, 4, ())) is not alone
    if not alone:
        spec = _specs(model, [RECIPES["torch.fp32"]], "none", "full")[0]
        judgement = Judge(RECIPES, load_ledger()).judge(Case(spec=spec, data=DataSpec()))
        assert judgement.ran and not judgement.causes


LINEARS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        for linear in self.linears:
            x = nn.functional.dropout(linear(x).relu(), 0.5, self.training)
        return x

def build():
    return Model(), torch.randn(16, 32)
"""


@pytest.mark.parametrize("how", ["full", "selective"])
def test_a_list_of_bare_linears_is_recomputed_with_the_model_and_judged(
    tmp_path: Path, how: str
) -> None:
    (tmp_path / "mine.py").write_text(LINEARS)
    (model,) = register(f"{tmp_path / 'mine.py'}:build")
    spec = _specs(model, [RECIPES["torch.fp32"]], "none", how)[0]
    judge, case = Judge(RECIPES, load_ledger()), Case(spec=spec, data=DataSpec())
    right = judge.judge(case)
    arms = {arm for _, _, arm, *_ in judged_layers(right.verdicts, spec.recipe, model.name)}
    assert not right.causes and arms == {"eager", with_checkpoint(EAGER, how).name}
    with planted("", "checkpoint-forgets-generator"):
        wrong = Judge(RECIPES, load_ledger()).judge(case)
    assert {cause.arm for cause in wrong.causes} == arms - {"eager"}


def test_a_weight_that_autocast_casts_once_is_nothing_kept(tmp_path: Path) -> None:
    body = "return self.up(x)"
    (tmp_path / "mine.py").write_text(BLOCKS.format(body=body, autocast=True))
    assert not register(f"{tmp_path / 'mine.py'}:build")[0].unrepeatable


CHUNKS = """
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

class Chunked(nn.Module):
    '''Its head is checkpointed chunk by chunk, as for the loss of a large vocabulary.'''
    def __init__(self, drifts):
        super().__init__()
        self.up, self.head, self.drifts, self.calls = nn.Linear(16, 16), nn.Linear(16, 8), drifts, 0

    def loss(self, x):
        self.calls += 1
        x = x * (1.0 + self.drifts * self.calls)
        return self.head(x).logsumexp(-1).sum()

    def forward(self, x):
        self.calls, parts = 0, self.up(x).chunk(4)
        return torch.stack([checkpoint(self.loss, one, use_reentrant=False) for one in parts])

class Halves(torch.autograd.Function):
    '''y1 = x1 + f(x2), y2 = x2; backward computes x1 from y, and f once more.'''
    @staticmethod
    def forward(ctx, x1, x2, f, g, *weights):
        with torch.no_grad():
            y1 = x1 + f(x2)
            y2 = x2 + g(y1)
        ctx.save_for_backward(y1, y2)
        ctx.f, ctx.g = f, g
        return y1, y2

    @staticmethod
    def backward(ctx, d1, d2):
        y1, y2 = (t.detach() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y1.requires_grad_()
            g = ctx.g(y1)
            g.backward(d2)
            d1 = d1 + y1.grad
        with torch.no_grad():
            x2 = y2 - g
        with torch.enable_grad():
            x2.requires_grad_()
            ctx.f(x2).backward(d1)
        return d1, d2 + x2.grad, None, None, *[None] * len(ctx.needs_input_grad[4:])

class Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        x1, x2 = x.chunk(2, -1)
        return torch.cat(Halves.apply(x1, x2, self.f, self.g, *self.parameters()), -1)

def chunked(): return Chunked(0.0), torch.randn(16, 16)
def drifting(): return Chunked(0.5), torch.randn(16, 16)
def reversible(): return Reversible(), torch.randn(16, 32)
"""


def recomputes(folder: Path, build: str) -> dict[str, set[str]]:
    """Status -> the layers of which O13 says so, with the whole model checkpointed in full."""
    (folder / "chunks.py").write_text(CHUNKS)
    model = register(f"{folder / 'chunks.py'}:{build}")[0]
    spec = _specs(model, [RECIPES["torch.fp32"]], "none", "full")[0]
    judgement = Judge(RECIPES, load_ledger()).judge(Case(spec=spec, data=DataSpec()))
    assert judgement.ran
    found: dict[str, set[str]] = {}
    for one in judgement.verdicts:
        if one.rule == "O13":
            found.setdefault(one.status, set()).add(one.at.layer)
    return found


def test_each_call_of_a_layer_is_compared_with_its_own_recompute(tmp_path: Path) -> None:
    """A model's own checkpoints are recomputed last first."""
    assert recomputes(tmp_path, "chunked") == {"ok": {"model.up", "model.head"}}
    found = recomputes(tmp_path, "drifting")
    assert found["diverged"] == {"model.head"}, "its recompute sees another factor"


def test_what_a_reversible_layer_computes_anew_is_no_recompute(tmp_path: Path) -> None:
    """Its input comes out of its output, with rounding errors; where it does not, it is judged."""
    layers = {"model.f", "model.g"}
    assert recomputes(tmp_path, "reversible") == {"ok": layers, "inconclusive": {"model.f"}}


IDS = """
import torch
from torch import nn

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2))

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return x

def blocks(): return Blocks(), (torch.randint(0, 64, (2, 16)),)
def frozen():
    model = Blocks()
    model.tokens.requires_grad_(False)
    return model, (torch.randint(0, 64, (2, 16)),)
def whole(): return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32)), (torch.arange(32),)
"""


def test_a_reentrant_checkpoint_needs_an_input_with_a_gradient(tmp_path: Path) -> None:
    """Token ids have none, but what a model's blocks are given has one."""
    (file := tmp_path / "ids.py").write_text(IDS)
    for build in ("whole", "frozen"):
        options = RunOptions(models=(f"{file}:{build}",))
        with pytest.raises(ValueError, match=r"cannot recompute .*: token ids carry no gradient"):
            _configuration(options, "cpu", "none", "reentrant", ())
    one = _configuration(RunOptions(models=(f"{file}:blocks",)), "cpu", "none", "reentrant", ())
    spec = _specs(one.model, one.recipes, one.compile, one.checkpoint)[0]
    judgement = Judge(RECIPES, load_ledger()).judge(Case(spec=spec, data=DataSpec()))
    arm, name = "eager+checkpoint_reentrant", one.model.name
    found = judged_layers(judgement.verdicts, "torch.fp32", name)
    layers = {layer for *_, here, _, layer in found if here == arm} - {""}
    assert layers == {"model.blocks.0.0", "model.blocks.1.0"}
    share = judged(
        Counter(found), {"torch.fp32": RECIPES["torch.fp32"]}, ["eager", arm], [name], "cpu"
    )
    assert len(share.met) == 2 and not share.never
