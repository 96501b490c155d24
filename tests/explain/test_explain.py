"""``narrowfuzz explain``: what a finding needs is told from what it merely has, and what makes it
go away from what does not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from fresh import ends
from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.events import Backward, Close, Forward, Open, Settings
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, DataSpec, Spec, Spike, dump_case
from narrowfuzz.explain.command import Question, explain
from narrowfuzz.explain.counting import DrawCounter, effect_of, role
from narrowfuzz.explain.switches import (
    Switch,
    akin_to,
    alternatives,
    compiled_otherwise,
    conditions,
    each_left_out,
    together,
)
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.recipe.recipe import load_every
from narrowfuzz.report.explanation import Count, Explained, Role, lines, load, saved_answer_lines
from narrowfuzz.report.store import Store
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.session import SessionOptions, open_session
from narrowfuzz.triage.triage import unconfirmed
from samples import every_recipe
from torchao.float8.float8_linear import Float8Linear

RECIPES = every_recipe()
OWN_KERNELS = "PyTorch's own kernels (torch.backends.mkldnn.flags(enabled=False))"


@pytest.mark.parametrize(
    ("own", "count", "found"),
    [
        (Count(20, 20), Count(0, 20), "needed"),
        (Count(5, 20), Count(0, 20), "needed"),
        (Count(4, 20), Count(0, 20), "cannot say"),
        (Count(20, 20), Count(0, 19), "cannot say"),
        (Count(20, 20), Count(0, 0), "cannot say"),
        (Count(20, 20), Count(0, 20, otherwise=1), "cannot say"),
        (Count(20, 20), Count(20, 20), "not needed"),
        (Count(20, 20), Count(9, 20), "cannot say"),
        (Count(10, 20), Count(5, 20), "not needed"),
        (Count(20, 20), Count(5, 5), "not needed"),
    ],
)
def test_what_a_count_says(own: Count, count: Count, found: Role) -> None:
    assert role(own, count) == found


@pytest.mark.parametrize(
    ("rule", "roles", "found"),
    [
        ("O25", ["sum"], "nothing judged"),  # of the operator in question no call is left
        ("O25", ["sum", "sgd_step.param"], "needed"),
        ("O5", ["output"], "needed"),
    ],
)
def test_another_operator_that_is_right_proves_nothing(
    rule: str, roles: list[str], found: Role
) -> None:
    def judge(case: Case, *_: Any, **__: Any) -> Any:
        passes = [Verdict(rule, "eager", role, "ok") for role in roles]
        return SimpleNamespace(verdicts=passes, causes=())

    spec = Spec(recipe="torch.bf16")
    verdict = Verdict(rule, "eager", "sgd_step.param", "diverged", "wrong value")
    fake: Any = SimpleNamespace(judge=judge, rungs=lambda spec: (EAGER,))
    counter = DrawCounter(fake, fake, verdict, time.monotonic() + 60)
    answer = effect_of(counter, Count(20, 20), Switch("", Case(spec=spec, data=DataSpec())))
    assert answer is not None and answer.role == found


def test_changes_are_made_together_or_not_at_all() -> None:
    case = Case(spec=Spec(recipe="torchao.float8.rowwise", m=7), data=DataSpec(values="tiny"))
    plain = Switch("", msgspec.structs.replace(case, data=DataSpec()))
    size, refused = (
        Switch(
            "", msgspec.structs.replace(case, spec=msgspec.structs.replace(case.spec, **changes))
        )
        for changes in ({"m": 64}, {"backend": "none"})
    )
    recipe = RECIPES["torchao.float8.rowwise"]
    both = together(case, recipe, [plain, size])
    assert both is not None
    assert (both.spec.m, both.data) == (64, DataSpec())
    assert together(case, recipe, [plain]) == plain.case
    assert together(case, recipe, [plain, refused]) is None


def test_each_condition_is_left_out_by_itself() -> None:
    spec = Spec(recipe="torch.bf16", model="attention", m=7, heads=2, checkpoint="full", batch=2)
    case = Case(spec=spec, data=DataSpec(values="heavy_tail", weight_exponent=4))
    recipe = RECIPES["torch.bf16"]
    found = {one.words: one.case for one in conditions(case, recipe)}
    assert {*found} == {
        "7 rows, no multiple of 32", "batch 2", "heads 2", "checkpoint full",
        "data of kind heavy_tail", "data that is far from 1",
    }  # fmt: skip
    assert found["heads 2"].spec == msgspec.structs.replace(spec, heads=1)
    for other in found.values():
        recipe.check(other.spec)
    ranks = Spec(recipe="torch.bf16", model="mlp_swiglu", sharding=Sharding(data=2))
    (one,) = conditions(Case(spec=ranks, data=DataSpec()), recipe)
    assert one.words == "2 ranks" and not one.case.spec.sharded


def test_events_are_named_by_what_happens() -> None:
    events = (Open(), Forward(values="gaussian", mode="train"), Close())
    spec = Spec(recipe="torch.fp32", dtype="fp32", events=events)
    (found,) = conditions(Case(spec=spec, data=DataSpec()), RECIPES["torch.fp32"])
    assert found.words == "its events (a region of autocast, forward dropped)"
    assert found.case.spec.events == ()


def test_settings_of_a_librarys_own_layers_are_asked_one_by_one() -> None:
    recipe = every_recipe()["reference.delayed"]
    settings = Settings(history=2, margin=1)
    events = (Forward(inside=True), Backward(of=(0,)))
    spec = Spec(
        recipe=recipe.name, model="library_linear", depth=2, settings=settings, events=events
    )
    recipe.check(spec)
    found = {
        one.words: one.case.spec for one in conditions(Case(spec=spec, data=DataSpec()), recipe)
    }
    assert {*found} == {"depth 2", "history 2", "margin 1"}
    assert found["margin 1"].settings == Settings(history=2)


def test_a_plain_case_has_no_conditions() -> None:
    plain = Case(spec=Spec(recipe="torch.bf16"), data=DataSpec())
    assert [*conditions(plain, RECIPES["torch.bf16"])] == []
    spiked = msgspec.structs.replace(
        plain, data=DataSpec(spikes=(Spike(tensor="input", row=0, col=0, bits="7f000000"),))
    )
    assert [one.words for one in conditions(spiked, RECIPES["torch.bf16"])] == [
        "1 single large number"
    ]


def test_what_could_be_switched_can_be_played() -> None:
    name = "torchao.float8.rowwise"
    spec = Spec(recipe=name, model="llama_block", compile="inductor", checkpoint="selective")
    akin = {n: r for n, r in RECIPES.items() if n.startswith("torchao.float8")}
    case, recipe = Case(spec=spec, data=DataSpec()), RECIPES[name]
    found = {
        a.words: a
        for a in (
            *compiled_otherwise(case, recipe),
            *alternatives(case, recipe, akin, each_left_out(recipe, ["wq", "wo"])),
        )
    }
    strict = found["torch._inductor.config.emulate_precision_casts = True"]
    assert strict.arm == "inductor_strict" and strict.case.spec == spec
    assert found["without torch.compile"].case.spec.compile == "none"
    assert found["full checkpointing in place of selective"].case.spec.checkpoint == "full"
    assert found["recipe torchao.float8.tensorwise"].case.spec.recipe.endswith("tensorwise")
    assert "recipe torchao.float8.rowwise" not in found
    without = found["wq not converted (--filter '!wq')"].case.spec.recipe
    assert without == f"{name}@!wq"
    for one in found.values():
        load_every((), [one.case.spec.recipe])[one.case.spec.recipe].check(one.case.spec)


def test_other_recipes_of_the_package_leave_the_same_linears_unconverted() -> None:
    found = akin_to("torchao.float8.rowwise@!blocks.0.head", RECIPES)
    assert "torchao.float8.tensorwise@!blocks.0.head" in found
    assert {name.partition("@")[2] for name in found} == {"!blocks.0.head"}
    plain = akin_to("torchao.float8.rowwise", RECIPES)
    assert {name.partition("@")[0] for name in found} == plain >= {"torchao.float8.rowwise"}
    for name in akin_to("torchao.mxfp8.rceil@!head", RECIPES):
        assert load_every((), [name])[name].name == name


@contextmanager
def wrong(where: Callable[..., bool]) -> Iterator[None]:
    """Linears double their result where this is true of their arguments."""
    linear = torch.nn.functional.linear

    def other(x: Any, weight: Any, bias: Any = None) -> Any:
        y = linear(x, weight, bias)
        return y * 2 if where(x, weight, bias) else y

    with patch.object(torch.nn.functional, "linear", other):
        yield


def explained(tmp_path: Path, spec: Spec, data: DataSpec | None = None) -> Explained:
    """What is said of what this case shows."""
    judge = open_session(SessionOptions(ledger="none")).new_judge(Ledger([]))
    case = Case(spec=spec, data=data or DataSpec())
    verdict = next(v for v in judge.judge(case).causes if v.role == "output")
    found = unconfirmed(judge, case, verdict)
    Store(tmp_path).add(found.finding, "")
    return explain(Question(str(tmp_path / "findings" / found.finding.id), seconds=120))


def words(answers: Any, role: Role) -> list[str]:
    return [answer.words for answer in answers if answer.role == role]


def test_what_it_needs_and_what_it_has(tmp_path: Path) -> None:
    with wrong(lambda x, weight, bias: bias is not None):
        told = explained(tmp_path, Spec(recipe="torch.bf16", bias=True, m=7, batch=3))
    assert told.shows == Count(20, 20) and told.asked_of == "the smallest case"
    assert words(told.needs, "needed") == ["bias"]
    assert {*words(told.needs, "not needed")} == {"7 rows, no multiple of 32", "batch 3"}
    assert words(told.switches, "not needed") == [OWN_KERNELS, "everything in fp32"]
    assert told.nearest.startswith("none matches; ") and told.untried == ()
    said = "\n".join(lines(told))
    assert "  bias: without it shown on 0 of 20" in said


def test_a_size_that_matters_for_its_values_alone_is_not_needed(tmp_path: Path) -> None:
    def where(x: Any, weight: Any, bias: Any) -> bool:
        return bool(x.abs().amax() < 0.5)

    seed = next(seed for seed in range(200) if abs(_first(seed)) < 0.5)
    with wrong(where):
        told = explained(tmp_path, Spec(recipe="torch.bf16", m=1, k=1, n=1), DataSpec(seed=seed))
    assert words(told.needs, "needed") == []
    (features,) = (one for one in told.needs if one.words.startswith("1 feature"))
    assert (features.role, features.data) == ("not needed", "multiplied by 2^-8")
    said = "\n".join(lines(told))
    assert "without it shown on 20 of 20 with data that is multiplied by 2^-8" in said


def test_a_size_that_matters_itself_is_needed_whatever_the_data(tmp_path: Path) -> None:
    with wrong(lambda x, weight, bias: x.shape[-1] % 2 == 1):
        told = explained(tmp_path, Spec(recipe="torch.bf16", k=33))
    assert words(told.needs, "needed") == ["33 features, no multiple of 32"]


def test_any_of_two_conditions_will_do(tmp_path: Path) -> None:
    with wrong(lambda x, weight, bias: bias is not None or x.ndim == 3):
        told = explained(tmp_path, Spec(recipe="torch.bf16", bias=True, batch=3))
    assert told.needs_one_of == ("batch 3", "bias") and not words(told.needs, "needed")
    said = "\n".join(lines(told))
    assert "It needs one of these, any of them: batch 3; bias" in said
    assert "does not need" not in said


def test_what_is_wrong_otherwise_is_not_the_same(tmp_path: Path) -> None:
    linear = torch.nn.functional.linear

    def other(x: Any, weight: Any, bias: Any = None) -> Any:
        y = linear(x, weight, bias)
        return y * 2 if bias is not None else y * float("nan")

    with patch.object(torch.nn.functional, "linear", other):
        told = explained(tmp_path, Spec(recipe="torch.bf16", bias=True))
    (bias,) = told.needs
    assert bias.role == "cannot say" and bias.count.otherwise == 20
    assert "something else wrong on 20" in "\n".join(lines(told))


def test_a_bug_that_shows_in_another_way_instead_is_not_gone(tmp_path: Path) -> None:
    linear = torch.nn.functional.linear

    def other(x: Any, weight: Any, bias: Any = None) -> Any:
        y = linear(x, weight, bias)
        # the result twice, or only its gradients
        return y * 2 if bias is not None else y + (y - y.detach())

    with patch.object(torch.nn.functional, "linear", other):
        told = explained(tmp_path, Spec(recipe="torch.bf16", bias=True))
    (bias,) = told.needs
    assert bias.count == Count(0, 20) and bias.role == "cannot say"
    assert "gradient" in bias.instead
    assert f"shown on 0 of 20; another rule finds: {bias.instead}" in "\n".join(lines(told))


def test_other_data_that_shows_it_is_named(tmp_path: Path) -> None:
    with wrong(lambda x, weight, bias: bool((x.abs() > 100 * x.abs().median()).any())):
        told = explained(tmp_path, Spec(recipe="torch.bf16"), DataSpec(values="outlier"))
    assert told.by_data["normally distributed"] == Count(0, 20)
    assert told.by_data["of kind outlier_rows"].shown > 10
    said = "\n".join(lines(told))
    assert "It shows with data that is multiplied by 2^-8 (20 of 20), multiplied by 2^8" in said
    assert ", of kind outlier_rows (" in said
    assert "It does not show with data that is normally distributed" in said


def test_what_makes_it_go_away(tmp_path: Path) -> None:
    with wrong(lambda x, weight, bias: torch._C._get_mkldnn_enabled()):
        told = explained(tmp_path, Spec(recipe="torch.fp32", dtype="fp32"))
    assert words(told.switches, "needed") == [OWN_KERNELS]
    assert f"It goes away with:\n  {OWN_KERNELS}: shown on 0 of 20" in "\n".join(lines(told))


@pytest.mark.heavy
def test_another_layer_that_must_be_converted_is_named(tmp_path: Path) -> None:
    forward, before = Float8Linear.forward, []

    def other(self: Any, x: Any) -> Any:
        y = forward(self, x)
        before.append(self.out_features)
        return y * 2 if before[-2:] == [32, 16] else y

    spec = Spec(recipe="torchao.float8.rowwise", backend="emulated", model="mlp_gelu", k=16, n=32)
    with patch.object(Float8Linear, "forward", other):
        told = explained(tmp_path, spec)
    assert words(told.switches, "needed") == ["up not converted (--filter '!up')"]


def test_filters_add_up() -> None:
    name = "torchao.float8.rowwise@up*"
    (recipe,) = each_left_out(load_every((), [name])[name], ["up.1"]).values()
    assert recipe.name == f"{name},!up.1"
    linear = torch.nn.Linear(16, 16)
    spec = Spec(recipe=recipe.name)
    chosen = [n for n in ("up.0", "up.1", "down") if recipe.convertible(linear, n, spec)]
    assert chosen == ["up.0"]


def test_a_size_that_hardly_shows_it_is_made_larger(tmp_path: Path) -> None:
    def where(x: Any, weight: Any, bias: Any) -> bool:
        return bool((x.abs() > 2.5).any())

    seed = next(
        seed for seed in range(200)
        if abs(float(_first(seed))) > 2.5
    )  # fmt: skip
    with wrong(where):
        told = explained(tmp_path, Spec(recipe="torch.bf16", m=1, k=1, n=1), DataSpec(seed=seed))
    assert "64 rows" in told.asked_of and told.shows.shown == 20


def _first(seed: int) -> float:
    from narrowfuzz.judge.observe import tensors_of

    case = Case(spec=Spec(recipe="torch.bf16", m=1, k=1, n=1), data=DataSpec(seed=seed))
    return float(tensors_of(case, RECIPES["torch.bf16"])["input"].reshape(-1)[0])


def test_what_does_not_show_and_what_is_no_finding_are_refused(tmp_path: Path) -> None:
    with wrong(lambda x, weight, bias: True):
        judge = open_session(SessionOptions(ledger="none")).new_judge(Ledger([]))
        case = Case(spec=Spec(recipe="torch.bf16"), data=DataSpec())
        verdict = judge.judge(case).causes[0]
        found = unconfirmed(judge, case, verdict)
    Store(tmp_path).add(found.finding, "")
    folder = str(tmp_path / "findings" / found.finding.id)
    with pytest.raises(ValueError, match="does not show here"):
        explain(Question(folder))
    (file := tmp_path / "case.json").write_bytes(dump_case(case))
    with pytest.raises(ValueError, match="name a finding's folder or id"):
        explain(Question(str(file)))
    assert ends("explain", folder) == 2


def test_what_does_not_always_show_is_tried_again(tmp_path: Path) -> None:
    calls = iter(range(10**6))
    with wrong(lambda x, weight, bias: True):
        explained(tmp_path, Spec(recipe="torch.bf16"))
    (folder,) = (tmp_path / "findings").iterdir()
    raw = json.loads((folder / "explain.json").read_bytes())
    for flake, tries in (("always", False), ("flaky", True)):
        (folder / "explain.json").write_text(json.dumps({**raw, "flake": flake}))
        # every result of the eighth call and of those after it is wrong
        with wrong(lambda x, weight, bias: next(calls) > 7):
            if tries:
                assert explain(Question(str(folder))).shows.shown == 20
            else:
                with pytest.raises(ValueError, match="does not show here"):
                    explain(Question(str(folder)))
        calls = iter(range(10**6))


def test_no_time_is_said(tmp_path: Path) -> None:
    with wrong(lambda x, weight, bias: bias is not None):
        explained(tmp_path, Spec(recipe="torch.bf16", bias=True))
        (folder,) = (tmp_path / "findings").iterdir()
        with pytest.raises(ValueError, match="take longer than 1e-06 s: give --seconds"):
            explain(Question(str(folder), seconds=1e-6))


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with wrong(lambda x, weight, bias: bias is not None):
        explained(tmp_path, Spec(recipe="torch.bf16", bias=True))
        (folder,) = (tmp_path / "findings").iterdir()
        capsys.readouterr()
        assert ends("explain", folder, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["needs"][0] == {
        "words": "bias",
        "count": {"shown": 0, "judged": 20, "of": 20, "otherwise": 0},
        "role": "needed",
        "cost": None,
        "data": "",
        "instead": "",
    }


def test_it_is_kept_in_the_findings_folder_where_reports_read_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with wrong(lambda x, weight, bias: bias is not None):
        told = explained(tmp_path, Spec(recipe="torch.bf16", bias=True))
    (folder,) = (tmp_path / "findings").iterdir()
    assert load(folder) == told
    said = saved_answer_lines(folder)
    assert said[0] == "The smallest case shows it with 20 of 20 random seeds."
    assert "  bias: without it shown on 0 of 20" in said
    capsys.readouterr()
    assert ends("report", folder) == 0
    assert "\n  It needs:\n    bias: without it shown on 0 of 20" in capsys.readouterr().out
    assert ends("report", folder, "--issue") == 0
    text = capsys.readouterr().out
    head = "### Conditions and workarounds\n\n- The smallest case shows it"
    assert head in text and "- It needs:\n  - bias: without it shown on 0 of 20" in text
    (folder / "causes.json").write_text("{}")
    with pytest.raises(ValueError, match=r"causes.json: .*narrowfuzz explain .* writes it anew"):
        load(folder)
    (folder / "causes.json").unlink()
    assert load(folder) is None and saved_answer_lines(folder) == ()
