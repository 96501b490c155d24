"""What a run says it has judged, of what can run here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from narrowfuzz.case.events import Backward, Forward, Reload, Step
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.models.model import Gradients, Model, Product
from narrowfuzz.operators.optimizer_steps import STEPS
from narrowfuzz.recipe.recipe import load_every
from narrowfuzz.report.judged import (
    COUNTING_RULES,
    Judged,
    called,
    happened,
    how_arms_ran,
    judged,
    judged_layers,
)
from narrowfuzz.report.outcome import Ended
from narrowfuzz.report.store import Store
from narrowfuzz.trace.address import At
from narrowfuzz.trace.verdict import Status, Verdict
from test_accepted import of, on_terminal

RECIPES = load_every()
BF16 = {"torch.bf16": RECIPES["torch.bf16"]}
LIBRARY = {"reference.delayed": RECIPES["reference.delayed"]}
EAGER = ["eager", "eager+checkpoint_reentrant"]


def verdict(rule: str, status: Status, layer: str = "") -> Verdict:
    return Verdict(rule, "eager", "output", status, at=At(layer=layer))


def test_rules_about_casts_and_multiplies_count_and_no_others() -> None:
    assert {"O2", "O3", "O5", "O15", "O13", "O20", "S1", "S2", "S12"} <= COUNTING_RULES
    assert not COUNTING_RULES & {"contract", "O1", "O8", "O9", "O12", "R5"}


@pytest.mark.parametrize(
    ("status", "counts"),
    [("ok", True), ("diverged", True), ("known", True), ("inconclusive", False),
     ("not_applicable", False)],
)  # fmt: skip
def test_what_a_rule_could_not_decide_was_not_judged(status: Status, counts: bool) -> None:
    seen = judged_layers(
        [verdict("O5", status, "proj"), verdict("O1", "ok")], "torch.bf16", "linear"
    )
    assert seen == ({("judged", "torch.bf16", "eager", "linear", "proj")} if counts else set())


@pytest.mark.parametrize(("recipe", "counts"), [("torch.bf16", True), ("torchao.mxfp8", False)])
def test_products_outside_of_linears_count_where_nothing_is_converted(
    recipe: str, counts: bool
) -> None:
    seen = judged_layers([replace(verdict("O25", "ok"), role="mm")], recipe, "mine.py:build#0")
    assert seen == ({("judged", recipe, "eager", "mine.py:build#0", "")} if counts else set())


def test_the_share_is_of_what_can_run() -> None:
    counts = judged_layers([verdict("O5", "ok", "proj")], "torch.bf16", "mlp_gelu")
    share = judged(Counter(counts), BF16, EAGER, ["mlp_gelu", "tied_embedding"], "cpu")
    # token ids carry no gradient: there is no reentrant checkpoint of that model
    assert share.met == {("torch.bf16", "eager", "mlp_gelu")}
    assert share.never == (
        ("torch.bf16", "eager", "tied_embedding"),
        ("torch.bf16", "eager+checkpoint_reentrant", "mlp_gelu"),
    )
    assert share.share == pytest.approx(100 / 3)
    assert share.layers["torch.bf16", "eager", "mlp_gelu"] == {"proj"}
    assert judged({}, {}, EAGER, [], "cpu").share == 100.0


def test_models_that_are_never_compiled_are_not_expected_to_be() -> None:
    models = ["softmax", "mxfp8_grouped_rceil"]
    never = judged({}, BF16, ["eager", "inductor"], models, "cpu").never
    assert {(arm, model) for _, arm, model in never} == {
        ("eager", "softmax"),
        ("inductor", "softmax"),
        ("eager", "mxfp8_grouped_rceil"),
    }


def test_a_device_without_an_arm_is_not_asked_for_it() -> None:
    names = [arm for arm in BY_NAME if arm.startswith("inductor")]
    assert not judged({}, BF16, names, ["linear"], "simulated").never


def test_a_librarys_own_layers_are_judged_and_said(tmp_path: Path) -> None:
    seen = judged_layers([verdict("O2", "ok")], "reference.delayed", "library_linear")
    counts: Counter[Any] = Counter({**dict.fromkeys(seen, 1), "cases": 3})
    share = judged(Counter(counts), LIBRARY, [*BY_NAME], [], "cpu")
    assert share.met == {("reference.delayed", "eager", "library_linear")}
    assert said(tmp_path, share, counts).startswith(
        "New findings: 0, known issues that showed: 0; suspected"
    )


def said(folder: Path, share: Judged, counts: Counter[Any], **more: Any) -> str:
    return on_terminal(of(Store(folder / "run"), counts, share=share, **more)).strip()


def test_a_run_without_a_case_says_that_it_says_nothing(tmp_path: Path) -> None:
    text = said(tmp_path, Judged(frozenset(), (("torch.bf16", "eager", "linear"),)), Counter())
    assert "Nothing was judged: this run has no result." in text
    assert "not checked: torch.bf16 eager linear" in text
    subject = said(tmp_path, Judged(frozenset(), ()), Counter(), subject="mine.py:build")
    assert subject.startswith("mine.py:build: nothing was checked")
    assert "no rule could judge" not in subject, "none has tried"
    assert "Give it more --minutes" in subject
    idle = Judged(frozenset(), ())
    with_cases = said(tmp_path, idle, Counter(), subject="mine.py:build", counted=True)
    assert "--minutes" not in with_cases


def ended(tmp_path: Path, share: Judged, counts: dict[Any, int], **more: Any) -> Ended:
    given = {"subject": "mine.py:build", "min_judged": 100.0, "share": share} | more
    return of(Store(tmp_path / "run"), Counter({"cases": 3, "first": 3} | counts), **given)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Model:
    made = Model(
        "mine.py:build#0", "mine.py:build", "OwnModel", lambda spec: (), "block", own=True,
        linears=("model.up", "model.down"),
    )  # fmt: skip
    monkeypatch.setitem(MODELS, made.name, made)
    return made


def counted(model: Model, arms: Sequence[str], cases: Sequence[Case]) -> set[tuple[Any, ...]]:
    """What a worker counts of these cases if rules look at one linear on each arm."""
    seen: set[tuple[Any, ...]] = set().union(*map(happened, cases))
    for arm in arms:
        one = Verdict("O5", arm, "output", "ok", at=At(layer="model.up"))
        seen |= judged_layers([one], "torch.bf16", model.name)
    return seen


def test_the_verdict_says_what_was_compared_and_no_more(tmp_path: Path, own: Model) -> None:
    arms = ["eager", "eager+checkpoint", "inductor+checkpoint"]
    spec = Spec(recipe="torch.bf16", model=own.name)
    cases = [Case(spec=spec, data=DataSpec(values=v)) for v in ("gaussian", "outlier")]
    counts = counted(own, arms, cases)
    share = judged(Counter(counts), BF16, arms, [own.name], "cpu")
    said = ended(tmp_path, share, dict.fromkeys(counts, 1)).soundness()
    assert "sound" not in said and said.startswith("No problems found in mine.py:build. ")
    assert "1 of 2 linears one by one" in said and "2 kinds of data" in said
    assert "recomputed (full)" in said and "compiled (inductor)" in said
    assert "Not checked: formulas of its own" in said
    assert "step" not in said and "reload" not in said  # none was judged
    calls = [Verdict("O25", "eager", role, "ok") for role in ("sum", "layer_norm.output")]
    others = {"silu": "no reference", "cos": "no reference", "attention": "dropout", "sum": "empty"}
    calls.append(Verdict("O25", "eager", "sum", "inconclusive", why="every element overflows"))
    calls += [Verdict("O25", "eager", x, "not_applicable", why=why) for x, why in others.items()]
    share = judged(Counter(counts | called(calls)), BF16, arms, [own.name], "cpu")
    said = ended(tmp_path, share, dict.fromkeys(counts, 1)).soundness()
    assert "; call by call layer norms and sums; " in said
    assert (
        "Not checked: attention (dropout); cos and silu (no reference); other sums (empty); "
        "formulas that combine " in said
    )
    assert not called([Verdict("O5", "eager", "a", "ok"), Verdict("O25", "eager", "output", "ok")])
    trained = msgspec.structs.replace(
        spec, events=(Forward(), Backward(of=(0,)), Step(), Reload(), Forward(mode="eval"))
    )
    counts = counted(own, ["eager"], [Case(spec=trained, data=DataSpec(regime="lattice"))])
    share = judged(Counter(counts), BF16, ["eager"], [own.name], "cpu")
    said = ended(tmp_path, share, dict.fromkeys(counts, 1)).soundness()
    assert "1 kind of data" in said and "over 1 step" in said and "a reload" in said
    assert "compiled" not in said and "recomputed" not in said


def test_gradients_that_no_product_determines_are_named(
    tmp_path: Path, own: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = counted(
        own, ["eager"], [Case(spec=Spec(recipe="torch.bf16", model=own.name), data=DataSpec())]
    )
    share = judged(Counter(counts), BF16, ["eager"], [own.name], "cpu")
    one = ended(tmp_path, share, dict.fromkeys(counts, 1))
    assert "gradients of" not in one.soundness()
    parts = ("up.bias", "up.input", "up.weight", "out_proj.weight")
    elsewhere = Gradients(tuple(f"model.{part}" for part in parts))
    called = (Product("model.up", 3, 4, 4), Product("model.down", 3, 4, 4))
    changed = replace(own, gradients=elsewhere, products=called)
    monkeypatch.setitem(MODELS, own.name, changed)
    said = one.soundness()
    assert "; gradients of 1 linear (up) between runs only, as other functions" in said
    assert "out_proj" not in said, "it is never called itself"


@pytest.mark.parametrize(
    ("counts", "arms", "more", "says"),
    [
        (
            {"first": 2},
            ["eager"],
            {},
            "3 cases were tried: give it more --minutes",
        ),
        ({"first": 2}, ["eager"], {"counted": True}, "give it more --cases"),
        ({}, ["eager", "inductor"], {}, "never judged on inductor"),
        ({}, ["eager"], {}, ""),
    ],
)
def test_what_did_not_happen_is_said_and_is_not_enough(
    tmp_path: Path, own: Model, counts: dict[Any, int], arms: list[str], more: Any, says: str
) -> None:
    spec = Spec(recipe="torch.bf16", model=own.name)
    seen = counted(own, ["eager"], [Case(spec=spec, data=DataSpec())])
    share = judged(Counter(seen), BF16, arms, [own.name], "cpu")
    one = ended(tmp_path, share, counts | dict.fromkeys(seen, 1), **more)
    assert bool(one.lacking) is bool(says) and says in one.soundness()
    assert one.soundness().startswith("No problems found in mine.py:build so far, but") is bool(
        says
    )


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (0, "none of its first 3 cases was"),
        (1, "only 1 of its first 3 cases was"),
        (2, "only 2 of its first 3 cases were"),
    ],
)
def test_how_many_first_cases_were_tried_is_said_in_grammar(
    tmp_path: Path, own: Model, first: int, says: str
) -> None:
    share = judged(Counter(), BF16, [], [own.name], "cpu")
    (tried, *_) = ended(tmp_path, share, {"first": first}).lacking
    assert tried == f"{says} tried: give it more --minutes"


def test_why_an_arm_was_never_judged_is_said(tmp_path: Path, own: Model) -> None:
    spec = Spec(recipe="torch.bf16", model=own.name)
    seen = counted(own, ["eager"], [Case(spec=spec, data=DataSpec())])
    seen |= {("blocked", "torch.bf16", "eager+checkpoint", own.name, "it may not")}
    arms = ["eager", "eager+checkpoint", "inductor"]
    share = judged(Counter(seen), BF16, arms, [own.name], "cpu")
    assert set(share.why.values()) == {"it may not"}
    assert ended(tmp_path, share, dict.fromkeys(seen, 1)).lacking == [
        "never judged on inductor: give it more --minutes",
        "never judged on eager+checkpoint: it may not",
    ]


def test_which_of_several_recipes_was_never_judged_is_said(tmp_path: Path, own: Model) -> None:
    seen = Counter(
        counted(
            own, ["eager"], [Case(spec=Spec(recipe="torch.bf16", model=own.name), data=DataSpec())]
        )
    )
    recipes = BF16 | {"torch.fp16": BF16["torch.bf16"]}
    share = judged(seen, recipes, ["eager"], [own.name], "cpu")
    assert ended(tmp_path, share, seen).lacking == [
        "never judged with torch.fp16 on eager: give it more --minutes"
    ]


def test_the_commonest_reason_is_said_and_none_that_a_run_refutes(
    tmp_path: Path, own: Model
) -> None:
    """A case of few raises for another reason than most."""
    name, arms = own.name, ["eager", "eager+checkpoint"]
    seen = {
        ("blocked", "torch.bf16", "eager", name, "its rarest error"): 4,
        ("blocked", "torch.bf16", "eager", name, "its usual error"): 36,
    }
    assert {*judged(seen, BF16, arms, [name], "cpu").why.values()} == {"its usual error"}
    spec = Spec(recipe="torch.bf16", model=name)
    seen = Counter(counted(own, ["eager"], [Case(spec=spec, data=DataSpec())])) | {
        ("blocked", "torch.bf16", "eager+checkpoint", name, "an error of some cases"): 10,
        ("ran", "torch.bf16", "eager+checkpoint", name): 44,
    }
    assert not judged(seen, BF16, arms, [name], "cpu").why, "more cases may help"
    seen["undecided", "torch.bf16", "eager+checkpoint", name, "no call was recomputed"] = 44
    share = judged(seen, BF16, arms, [name], "cpu")
    assert {*share.why.values()} == {"no call was recomputed"}
    one = ended(tmp_path, share, seen | {"first stopped": 1})
    assert one.judged().endswith("2 of 3 first cases ran"), "that error is not one of theirs"
    seen["stopped", "torch.bf16", "eager", name, "an error of first cases"] = 1
    one = ended(tmp_path, share, seen | {"first stopped": 1})
    assert "2 of 3 first cases ran, others did not: an error of first" in one.judged()


def test_few_cases_that_run_do_not_refute_what_stops_all_others(own: Model) -> None:
    """A forward alone may run where a recipe refuses each backward."""
    name, arms = own.name, ["eager", "eager+checkpoint"]
    spec = Spec(recipe="torch.bf16", model=name)
    seen = Counter(counted(own, ["eager"], [Case(spec=spec, data=DataSpec())]))
    for arm, times in {"eager": 34, "eager+checkpoint": 22}.items():
        seen["blocked", "torch.bf16", arm, name, "a backward is refused"] = times
        seen["ran", "torch.bf16", arm, name] = 2
    assert {*judged(seen, BF16, arms, [name], "cpu").why.values()} == {"a backward is refused"}
    del seen["ran", "torch.bf16", "eager+checkpoint", name]
    del seen["blocked", "torch.bf16", "eager+checkpoint", name, "a backward is refused"]
    share = judged(seen, BF16, arms, [name], "cpu")
    assert {*share.why.values()} == {"a backward is refused"}, "it runs only after eager"


def test_what_verdicts_say_of_how_their_arms_ran() -> None:
    def because(rule: str, status: Status, why: str) -> Verdict:
        return replace(verdict(rule, status), why=why)

    def said(*verdicts: Verdict) -> set[tuple[str, ...]]:
        return {(kind, *why) for kind, _, _, _, *why in how_arms_ran(verdicts, "r", "m", ())}

    assert said(verdict("contract", "ok"), because("O13", "inconclusive", "no call")) == {
        ("ran",), ("undecided", "no call"),
    }  # fmt: skip
    assert said(because("contract", "ok", "clear refusal")) == set()
    refused = because("contract", "inconclusive", "no memory")
    assert said(refused) == {("blocked", "no memory")}
    asked = ("eager", "inductor")
    assert how_arms_ran([refused], "r", "m", asked) == {
        ("blocked", "r", arm, "m", "no memory") for arm in asked
    }, "it runs only after eager"


def test_a_model_that_raises_does_not_run_and_it_is_said_why(tmp_path: Path, own: Model) -> None:
    why = ("torch.bf16", "eager", own.name, "known issue linear-output-in-place")
    seen = {("blocked", *why)}
    share = judged(Counter(seen), BF16, ["eager", "eager+checkpoint"], [own.name], "cpu")
    counts = dict.fromkeys(seen, 1) | {"first stopped": 3, ("stopped", *why): 3}
    one = ended(tmp_path, share, counts | {("known", "linear-output-in-place"): 3})
    assert one.soundness().startswith(
        "mine.py:build does not run with torch.bf16: 3 of its first 3 cases raised; "
    )
    assert "never judged on eager, eager+checkpoint: known issue linear-out" in one.soundness()
    assert "0 of 3 first cases ran" in one.judged()


def test_more_time_is_no_remedy_where_all_that_was_tried_raised(tmp_path: Path, own: Model) -> None:
    stopped = {("stopped", "torch.bf16", "eager", own.name, "it raises ValueError"): 2}
    seen = {("blocked", "torch.bf16", "eager", own.name, "it raises ValueError"): 2}
    share = judged(Counter(seen), BF16, ["eager"], [own.name], "cpu")
    one = ended(tmp_path, share, stopped | seen | {"first": 2, "first stopped": 2})
    assert one.soundness() == (
        "mine.py:build does not run with torch.bf16: only 2 of its first 3 cases were tried; "
        "2 of its first 3 cases raised; never judged on eager: it raises ValueError"
    )
    one = ended(tmp_path, share, stopped | seen | {"first": 2, "first stopped": 1})
    assert "were tried: give it more --minutes" in one.soundness()


def test_a_model_whose_backward_always_raises_does_not_train(tmp_path: Path, own: Model) -> None:
    """Though its forward has run, which rules have judged."""
    spec = Spec(recipe="torch.bf16", model=own.name)
    seen = counted(own, ["eager"], [Case(spec=spec, data=DataSpec())])
    seen |= {("ran", "torch.bf16", "eager", own.name)}
    seen |= {("blocked", "torch.bf16", "eager", own.name, "it raises ValueError")}
    share = judged(Counter(seen), BF16, ["eager"], [own.name], "cpu")
    assert not share.never
    stopped = {("stopped", "torch.bf16", "eager", own.name, "it raises ValueError"): 3}
    counts = dict.fromkeys(seen, 1) | stopped
    one = ended(tmp_path, share, counts | {"first stopped": 3})
    said = "3 of its first 3 cases raised: it raises ValueError"
    assert one.soundness() == f"mine.py:build does not train with torch.bf16: {said}"
    share = judged(Counter(seen), BF16, ["eager", "eager+checkpoint"], [own.name], "cpu")
    assert share.never, "the checkpoint needs a backward"
    one = ended(tmp_path, share, counts | {"first stopped": 3})
    assert one.soundness().startswith(
        "mine.py:build does not train with torch.bf16: 3 of its first 3 cases raised"
    )
    share = judged(Counter(seen), BF16, ["eager"], [own.name], "cpu")
    ran = ended(tmp_path, share, counts | {"first stopped": 2})
    assert not ran.lacking


def test_what_is_not_a_users_model_lacks_nothing(tmp_path: Path) -> None:
    share = Judged(frozenset(), (("torch.bf16", "eager", "linear"),))
    assert not ended(tmp_path, share, {"first": 0}, subject="").lacking


@pytest.mark.parametrize(
    ("judged_steps", "what"), [((), "steps"), (("sgd_step.param",), "other steps")]
)
def test_steps_that_nobody_judged_are_other_ones_than_those_that_were(
    judged_steps: tuple[str, ...], what: str
) -> None:
    """Of a model that one backend converts to a library's own tensors, and another does not."""
    verdicts = [Verdict("O25", "eager", role, "ok") for role in judged_steps]
    verdicts.append(Verdict("O25", "eager", STEPS, "not_applicable", why="of other parameters"))
    share = judged(Counter(called(verdicts)), BF16, ["eager"], [], "cpu")
    assert share.unjudged == {f"{what} of optimizers": "of other parameters"}


def test_cases_of_which_nothing_was_judged_are_no_result(tmp_path: Path) -> None:
    one = ("torch.bf16", "sharded", "linear")
    share = Judged(frozenset(), (one,), why={one: "tokens must be a multiple of 32, got 66"})
    text = said(tmp_path, share, Counter({"cases": 58}))
    assert "Nothing was judged: this run has no result." in text
    assert "never judged on sharded: tokens must be a multiple of 32, got 66" in text
    known = Counter({"cases": 58, ("known", "mx-byte0-rceil"): 3})
    assert "Nothing was judged" not in said(tmp_path / "known", share, known)
