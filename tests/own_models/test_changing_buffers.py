"""Models whose forward changes a buffer: every run begins with what is built, and what a recompute
changes once more is known, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from narrowfuzz.campaign.check_head import Configuration, head
from narrowfuzz.campaign.run_options import RunOptions
from narrowfuzz.case.events import Backward, Event, Forward, Reload, Step
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.draw.specs import fixed
from narrowfuzz.judge.judge import Judge, Judgement
from narrowfuzz.ledger.ledger import Ledger, load_ledger
from narrowfuzz.ledger.mitigations import CURES
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.own_models import register
from narrowfuzz.recipe.recipe import load_recipes
from narrowfuzz.report.judged import blocked_arms
from narrowfuzz.trace.verdict import fingerprint
from torch.utils.checkpoint import checkpoint

RECIPES = load_recipes()
SOURCE = """
import torch, torch.nn.functional as F
from torch import nn
class Counts(nn.Module):
    '''Its router sends no more tokens to the experts that had most of them so far.'''
    def __init__(self, biased, saved=True):
        super().__init__()
        self.gate, self.experts, self.biased = nn.Linear(8, 4), nn.Linear(8, 32), biased
        self.register_buffer("tokens", torch.zeros(4), persistent=saved)
    def forward(self, x):
        scores = torch.sigmoid(self.gate(x))
        chosen = (scores.float() - self.tokens * self.biased).argmax(-1)
        with torch.no_grad():
            self.tokens += torch.bincount(chosen.flatten(), minlength=4)
        parts = self.experts(x).unflatten(-1, (4, 8))
        y = parts.gather(-2, chosen[..., None, None].expand(*chosen.shape, 1, 8)).squeeze(-2)
        return y * scores.amax(-1, keepdim=True)
def counted(): return Counts(0.0), torch.randn(16, 8)
def unsaved(): return Counts(0.0, False), torch.randn(16, 8)
class Forgets(Counts):
    def _load_from_state_dict(self, state, prefix, *how):
        state[prefix + "tokens"] = torch.zeros(4)
        super()._load_from_state_dict(state, prefix, *how)
def forgets(): return Forgets(0.0), torch.randn(16, 8)
class Once(Counts):
    def forward(self, x):
        if self.tokens.sum() > 16: raise IndexError("no room")
        return super().forward(x)
def once(): return Once(0.0), torch.randn(16, 8)
def spectral():
    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    return nn.Sequential(linear), torch.randn(16, 8)
def biased(): return Counts(0.25), torch.randn(16, 8)
class Assigns(Counts):
    def forward(self, x):
        self.tokens = self.tokens + 1.0
        return self.experts(x)
def assigns(): return Assigns(0.0), torch.randn(16, 8)
class Teaches(nn.Module):
    '''Its teacher follows the student in each forward, by .data or not, from equal weights or
    others.'''
    def __init__(self, always=False, apart=0.0, by_data=False):
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.always, self.by_data = always, by_data
        for t, s in zip(self.teacher.parameters(), self.student.parameters()):
            t.data.copy_(s.data + apart)
    def forward(self, x):
        if self.training or self.always:
            with torch.no_grad():
                for t, s in zip(self.teacher.parameters(), self.student.parameters()):
                    (t.data if self.by_data else t).lerp_(s, 0.25)
        with torch.no_grad():
            y = self.teacher(x)
        return self.student(x) * y
class Averages(nn.Linear):
    '''It evaluates with an average of its weights, which a buffer holds.'''
    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("average", self.weight.detach().clone())
    def forward(self, x):
        if self.training:
            self.average.lerp_(self.weight.detach(), 0.25)
            return super().forward(x)
        return F.linear(x, self.average, self.bias)
def averages(): return nn.Sequential(Averages()), torch.randn(16, 8)
class Normalises(nn.Linear):
    '''It normalises its weights before each use.'''
    def forward(self, x):
        with torch.no_grad():
            self.weight.copy_(F.normalize(self.weight, dim=-1))
        return super().forward(x)
def normalises(): return nn.Sequential(nn.Linear(8, 8), Normalises(8, 8)), torch.randn(16, 8)
def teaches(): return Teaches(), torch.randn(16, 8)
def by_data(): return Teaches(by_data=True), torch.randn(16, 8)
def apart(): return Teaches(apart=0.5), torch.randn(16, 8)
def always(): return Teaches(always=True), torch.randn(16, 8)
class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
class Delegates(nn.Module):
    '''It counts its forwards in a buffer of a part that has no forward, and may read it.'''
    def __init__(self, reads):
        super().__init__()
        self.layer, self.forwards, self.reads = nn.Linear(8, 8), Counter(), reads
    def forward(self, x):
        with torch.no_grad():
            self.forwards.count.add_(1.0)
        return self.layer(x) * (self.forwards.count.clone() if self.reads else 1.0)
def delegates(): return Delegates(False), torch.randn(16, 8)
def reads_it(): return Delegates(True), torch.randn(16, 8)
class Block(nn.Module):
    def __init__(self, owner):
        super().__init__()
        self.up, self.owner = nn.Linear(8, 8), [owner]
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, x):
        self.calls += self.owner[0].inside
        self.owner[0].seen += self.owner[0].through
        return self.up(x)
class Blocks(nn.Module):
    '''Counters: of each block, of the model that blocks write to, and of the model itself.'''
    def __init__(self, inside=0, through=0, later=0):
        super().__init__()
        self.inside, self.through, self.later = inside, through, later
        self.blocks = nn.ModuleList([Block(self)])
        for name in ("calls", "seen"): self.register_buffer(name, torch.zeros(()))
        self.register_buffer("weight", self.blocks[0].up.weight.detach().clone())
    def forward(self, x):
        self.calls += 1
        if self.later: self.weight.copy_(self.blocks[0].up.weight.detach())
        return self.blocks[0](x)
def outside(): return Blocks(), torch.randn(16, 8)
def inside(): return Blocks(inside=1), torch.randn(16, 8)
def through(): return Blocks(through=1), torch.randn(16, 8)
def later(): return Blocks(later=1), torch.randn(16, 8)
def normed():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)), torch.randn(16, 8)
"""
#: The arms of each way to recompute.
ARMS = {
    "none": (),
    "full": ("eager+checkpoint",),
    "reentrant": ("eager+checkpoint_reentrant",),
    "selective": ("eager+checkpoint_selective",),
}
TWO_STEPS = (Forward(), Backward(of=(0,)), Step(), Forward(), Backward(of=(1,)))
EVALUATED = (Forward(), Backward(of=(0,)), Forward(mode="eval"))
Judged = Callable[..., Judgement]


@pytest.fixture
def judged(tmp_path: Path) -> Judged:
    """judged(build, events, checkpoint): of a model of that source, beside eager."""
    file = tmp_path / "counts.py"
    file.write_text(SOURCE)

    def judge(
        build: str,
        events: tuple[Event, ...],
        how: str = "none",
        *,
        known: bool = False,
        microbatches: int = 1,
    ) -> Judgement:
        (model,) = register(f"{file}:{build}")
        spec = fixed(
            Spec(recipe="torch.fp32", model=model.name, dtype="fp32"), RECIPES["torch.fp32"]
        )
        spec = msgspec.structs.replace(
            spec, events=events, checkpoint=how, microbatches=microbatches
        )
        arms = {"eager", *ARMS[how]}
        ledger = load_ledger() if known else Ledger([])
        return Judge(RECIPES, ledger, frozenset(arms)).judge(Case(spec=spec, data=DataSpec(seed=2)))

    return judge


@pytest.mark.parametrize("build", ["counted", "biased", "normed"])
def test_every_run_begins_with_what_is_built(judged: Judged, build: str) -> None:
    judgement = judged(build, TWO_STEPS)
    assert [v.sentence() for v in judgement.causes] == [] and judgement.ran
    model = MODELS[judgement.case.spec.model]
    assert model.changing[-1] in ("model.tokens", "model.1.running_var")
    assert model.operators is not None, "its backward was tried, too"


def test_ranks_count_rows_of_their_own() -> None:
    """So their counts are not compared, neither with one process's nor with one another's."""
    spec = Spec(recipe="torch.fp32", model="balanced_experts", dtype="fp32")
    spec = fixed(msgspec.structs.replace(spec, m=16, k=16, n=16), RECIPES["torch.fp32"])
    name, data = "router.counts.buffer", DataSpec(seed=2)
    judge = Judge(RECIPES, Ledger([]), frozenset({"eager"}))
    alone = judge.observe(Case(spec=spec, data=data)).traces["eager"].outputs
    assert alone[name].sum() == 2 * 16, "two experts for each row"
    spread = msgspec.structs.replace(spec, sharding=Sharding(data=2))
    judge = Judge(RECIPES, Ledger([]), frozenset({"eager", "sharded"}))
    judgement = judge.judge(Case(spec=spread, data=data))
    assert [v.sentence() for v in judgement.causes] == [] and judgement.ran
    made = judge.observe(Case(spec=spread, data=data)).traces["sharded"].ranks
    assert len(made) == 2
    assert all(one.outputs and name not in one.outputs for one in made)


def test_a_checkpoint_that_dynamo_leaves_out_is_never_judged_and_says_so(tmp_path: Path) -> None:
    """It compiles no checkpoint of a function that assigns to a buffer."""
    (file := tmp_path / "assigns.py").write_text(SOURCE)
    (model,) = register(f"{file}:assigns")
    spec = fixed(Spec(recipe="torch.fp32", model=model.name, dtype="fp32"), RECIPES["torch.fp32"])
    spec = msgspec.structs.replace(spec, compile="aot_eager", checkpoint="full")
    arms = frozenset({"eager", "eager+checkpoint", "aot_eager+checkpoint"})
    verdicts = Judge(RECIPES, Ledger([]), arms).judge(Case(spec=spec, data=DataSpec())).verdicts
    why = "0 of 2 compiled graphs ran; Dynamo ran the rest in eager mode"
    assert blocked_arms(verdicts, spec.recipe, spec.model) == {
        ("blocked", spec.recipe, "aot_eager+checkpoint", spec.model, why)
    }


def test_gradients_of_what_a_recompute_counted_are_a_finding(judged: Judged) -> None:
    judgement = judged("reads_it", TWO_STEPS, "full", known=True)
    assert {v.role for v in judgement.causes} & {"grad_input", "grad_parameter", "output"}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("how", ["full", "reentrant", "selective"])
@pytest.mark.parametrize(
    ("build", "events", "role"),
    [
        ("counted", TWO_STEPS, "buffer"),
        ("delegates", TWO_STEPS, "buffer"),
        ("normed", TWO_STEPS, "buffer"),
        ("normed", EVALUATED, "output"),
        ("unsaved", TWO_STEPS, ""),
    ],
)
def test_what_a_recompute_changes_once_more_is_known(
    judged: Judged, build: str, events: tuple[Event, ...], role: str, how: str
) -> None:
    """It shows in an evaluation and in the buffer itself, if that is saved; gradients are right."""
    judgement = judged(build, events, how, known=True)
    assert [fingerprint(v, "torch") for v in judgement.causes] == []
    known = {(verdict.role, verdict.explained_by) for verdict in judgement.known}
    assert known == ({(role, "checkpoint-changes-buffers-twice")} if role else set())


@pytest.mark.parametrize(
    ("build", "again"),
    [
        ("outside", ()),
        ("inside", ("model.blocks.0.calls",)),
        ("through", ("model.seen",)),
        ("later", ("model.weight",)),  # it changes after a step alone: nobody knows where
        ("counted", ("model.tokens",)),  # recomputed as a whole
        ("teaches", ("model.teacher.bias", "model.teacher.weight")),
    ],
)
def test_a_recompute_changes_what_its_regions_change_and_nothing_else(
    tmp_path: Path, build: str, again: tuple[str, ...]
) -> None:
    (file := tmp_path / "counts.py").write_text(SOURCE)
    (model,) = register(f"{file}:{build}")
    assert model.changing_again == again
    assert {*again} <= {*model.changing, *model.changing_parameters}
    assert ("model.calls" in model.changing) is bool(model.regions)
    options = RunOptions(models=(model.name,))
    for how, said in (("none", ()), ("full", again)):
        facts = Configuration(options, model, (), "none", how, (), (), [])  # type: ignore[arg-type]
        text = head(facts, 10, [])
        for name in (*model.changing, *model.changing_parameters):
            (line,) = (line for line in text.splitlines() if name.removeprefix("model.") in line)
            assert ("recompute changes" in line) is bool(said)
        which = "them" if not model.regions else ", ".join(said).replace("model.", "")
        assert (f"a checkpoint's recompute changes {which} again" in text) is bool(said)
        assert facts.facts["changes_buffers"] is bool({*again} & {*model.changing})


def test_a_recompute_that_chooses_other_experts_is_a_finding(judged: Judged) -> None:
    """It reads what its forward has counted, so gradients are those of another routing."""
    judgement = judged("biased", TWO_STEPS, "full", known=True)
    assert {verdict.rule for verdict in judgement.causes} == {"O12"}
    said = judgement.causes[0].sentence()
    assert "output differs with checkpointing" in said and "as in its forward" in said


@pytest.mark.parametrize(
    ("build", "says"),
    [
        ("once", "calling it several times in a row raised IndexError: no room"),
        ("spectral", "each time that the weight of 0 is read, a buffer changes"),
    ],
)
def test_what_cannot_be_repeated_is_refused(judged: Judged, build: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        judged(build, TWO_STEPS)


def test_microbatches_of_what_remembers_are_not_added(judged: Judged) -> None:
    """A microbatch by itself chooses other experts than behind another one."""
    found = {}
    for build in ("biased", "counted", "normed"):
        judgement = judged(build, (), microbatches=3)
        (verdict,) = (v for v in judgement.verdicts if v.rule == "R23")
        found[build] = verdict.status, MODELS[judgement.case.spec.model].remembers
    assert found.pop("biased") == ("not_applicable", True)
    assert set(found.values()) == {("ok", False)}


def test_what_an_evaluation_counts_is_no_finding(judged: Judged) -> None:
    between = (
        Forward(),
        Forward(mode="eval"),
        Backward(of=(0,)),
        Step(),
        Forward(),
        Backward(of=(2,)),
    )
    judgement = judged("counted", between)
    assert {v.status for v in judgement.verdicts if v.rule == "R24"} == {"ok"}
    assert not judgement.causes


def test_a_forward_in_training_mode_is_no_evaluation_to_what_remembers(judged: Judged) -> None:
    """Its counts choose other experts afterwards, with a graph or without."""
    dropped = Forward(), Backward(of=(0,)), Forward(mode="no_grad"), Forward(), Backward(of=(2,))
    for build, status in (("biased", "not_applicable"), ("counted", "ok")):
        judgement = judged(build, dropped)
        assert {v.status for v in judgement.verdicts if v.rule == "R24"} == {status}
        assert not judgement.causes


def test_a_reload_that_loses_a_buffer_is_a_finding(judged: Judged) -> None:
    reloaded = Forward(), Backward(of=(0,)), Step(), Reload(), Forward(), Backward(of=(1,))
    assert not judged("counted", reloaded).causes
    (verdict,) = judged("forgets", reloaded).causes
    assert (verdict.rule, verdict.role) == ("R25", "buffer")
    begins = "buffer model.tokens of a training is changed by a save and reload"
    assert verdict.sentence().startswith(begins)


def test_another_fault_of_a_recompute_is_no_known_one(
    judged: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its products are a thousandth larger inside of a backward."""
    usual = torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = usual(x, weight, bias)
        return y * 1.001 if torch._C._current_graph_task_id() != -1 else y

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    judgement = judged("normed", TWO_STEPS, "full", known=True)
    assert {verdict.rule for verdict in judgement.causes} == {"O13"}, "and O12 with it"


TAUGHT = ("model.teacher.bias", "model.teacher.weight")


@pytest.mark.parametrize("build", ["teaches", "by_data", "apart"])
def test_a_teacher_that_forwards_move_is_no_finding(judged: Judged, build: str) -> None:
    """Forwards in training move it, with a graph or without."""
    events = (Forward(), Forward(mode="no_grad"), Backward(of=(0,)), Step(), Forward())
    assert not judged(build, (*events, Backward(of=(2,)))).causes
    assert not judged(build, (), microbatches=2).causes
    assert not judged(build, EVALUATED).causes
    (model,) = (one for name, one in MODELS.items() if name.startswith(f"counts.py:{build}#"))
    assert model.changing_parameters == TAUGHT and model.remembers


def test_weights_that_are_normalised_before_use_are_no_finding(judged: Judged) -> None:
    assert not judged("normalises", TWO_STEPS).causes


def test_a_buffer_that_changes_only_after_a_step_is_seen(judged: Judged) -> None:
    """It begins as a copy of the weights."""
    assert not judged("averages", (*TWO_STEPS, Step(), Forward(mode="eval"))).causes
    (model,) = (one for name, one in MODELS.items() if name.startswith("counts.py:averages#"))
    assert model.changing == ("model.0.average",) and not model.changing_parameters


def test_a_teacher_that_an_evaluation_moves_is_found(judged: Judged) -> None:
    events = (Forward(), Backward(of=(0,)), Step(), Forward(mode="eval"), Forward())
    assert {v.rule for v in judged("always", events).causes} == {"R24"}
    assert not judged("teaches", events).causes


def test_a_teacher_that_a_recompute_moves_again_is_found(judged: Judged) -> None:
    (cause,) = judged("apart", TWO_STEPS, "full").causes
    assert "recompute" in cause.sentence() or "checkpointing" in cause.sentence()


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_cure_leaves_buffers_to_the_forward(reentrant: bool) -> None:
    norm, x = torch.nn.BatchNorm1d(4), torch.randn(8, 4, requires_grad=True)
    with CURES["buffers_that_a_recompute_leaves"]():
        y = checkpoint(norm, x, use_reentrant=reentrant)
        assert norm.num_batches_tracked == 1
        y.sum().backward()
    assert norm.num_batches_tracked == 1
    y = checkpoint(norm, x, use_reentrant=reentrant)
    y.sum().backward()
    assert norm.num_batches_tracked == 3, "it leaves no trace"


def test_the_cure_knows_modules_that_call_themselves() -> None:
    class Nested(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            self.calls.add_(1)
            return self(x.sin(), depth - 1) if depth else x.sin()

    nested, x = Nested(), torch.ones(4, requires_grad=True)
    with CURES["buffers_that_a_recompute_leaves"]():
        checkpoint(nested, x, 2, use_reentrant=False).sum().backward()
    assert nested.calls == 3
