"""A recipe in a folder, whose filter leaves linears alone: they are judged as what they are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from draws import ONCE
from hypothesis import given, settings
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.draw.strategies import cases, direct_cases
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger, load_ledger
from narrowfuzz.recipe.recipe import Recipe, load_recipes, named, runnable
from narrowfuzz.trace.verdict import Verdict, fingerprint
from narrowfuzz.triage.prove import proven
from narrowfuzz.triage.verify import RunScript

FOLDER = Path(__file__).parents[2] / "examples" / "filtered_float8"
NAME = "mine.float8.filtered"


@cache
def recipes() -> dict[str, Recipe]:
    return load_recipes([FOLDER])


def judge(**changed: Any) -> Judge:
    recipe = replace(recipes()[NAME], **changed)
    return Judge({**recipes(), NAME: recipe}, Ledger([]))


def case_of(**spec: Any) -> Case:
    fields = {"backend": "emulated", "m": 32, "k": 32, "n": 32}
    return Case(spec=Spec(recipe=NAME, **{**fields, **spec}), data=DataSpec(seed=3))


def of(verdicts: tuple[Verdict, ...], rule: str, layer: str) -> set[str]:
    return {v.status for v in verdicts if (v.rule, v.at.layer) == (rule, layer)}


def test_what_the_filter_leaves_alone_is_judged_unquantised() -> None:
    judged = judge().judge(case_of(model="attention"))
    assert not judged.causes
    assert of(judged.verdicts, "O2", "wq") == {"ok"}
    assert of(judged.verdicts, "O2", "wo") == {"not_applicable"}
    assert of(judged.verdicts, "O5", "wo") == {"ok"}
    single = judge().judge(case_of(k=40))  # no multiple of 16
    assert not single.causes
    assert {v.status for v in single.verdicts if v.rule == "O3"} == {"not_applicable"}


def test_an_error_of_a_layer_left_alone_is_not_within_what_quantising_may_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One part in thirty: float8 may be off by that, a plain linear may not."""
    from torch import nn

    plain = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: plain(self, x) * (1 + 2.0**-5))
    judged = judge().judge(case_of(model="attention"))
    assert of(judged.verdicts, "O5", "wo") == {"diverged"}
    assert of(judged.verdicts, "O5", "wq") == {"ok"}


@pytest.mark.parametrize("spec", [{"model": "attention"}, {"k": 40}])
def test_what_is_wrong_with_a_linear_left_alone_is_pytorchs(
    monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any]
) -> None:
    """Its findings are called, and known, as those of the recipe that converts nothing."""
    from torch import nn

    plain = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: plain(self, x) * (1 + 2.0**-5))
    own = judge()
    judged = own.judge(case_of(**spec))
    (wrong,) = [v for v in judged.causes if v.rule == "O5" and v.role == "output"][:1]
    assert fingerprint(wrong, judged.family).endswith("--torch")
    assert own.as_known(judged.case, wrong).spec.recipe == "torch.bf16"
    assert own.as_known(judged.case).spec.recipe == "torchao.float8.rowwise"


@pytest.mark.parametrize("names", [("up", "down"), ("up",)])
def test_a_filter_may_go_by_names(names: tuple[str, ...]) -> None:
    """No layer is judged under another one's name."""

    def convert(model: Any, spec: Spec) -> Any:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name("rowwise")
        return convert_to_float8_training(
            model, config=replace(config, emulate=True), module_filter_fn=lambda m, n: n in names
        )

    own = judge(convert=convert, convertible=lambda m, n, spec: n in names)
    judged = own.judge(case_of(model="mlp_gelu"))
    assert not judged.causes, judged.causes[0].sentence()
    for layer in ("up", "down"):
        wanted = {"ok"} if layer in names else {"not_applicable"}
        assert of(judged.verdicts, "O2", layer) == wanted


def test_what_is_known_of_the_recipe_it_is_based_on_is_known_of_it() -> None:
    case = case_of(k=0)
    known = Judge(recipes(), load_ledger()).judge(case)
    assert known.known and not known.causes
    alone = {**recipes(), NAME: replace(recipes()[NAME], based_on="")}
    assert Judge(alone, load_ledger()).judge(case).causes


def test_a_filter_that_conversion_does_not_follow_is_told() -> None:
    """The author promises every linear, torchao is asked for fewer."""
    promise = recipes()["torchao.float8.rowwise"].convertible
    judged = judge(convertible=promise).judge(case_of(model="attention"))
    told = [(v.rule, v.symptom, v.at.layer or v.at.name) for v in judged.causes]
    assert ("census", "left unconverted") in {one[:2] for one in told}


@pytest.mark.heavy
@settings(ONCE, max_examples=25)
@given(cases([able for r in [load_recipes([FOLDER])[NAME]] if (able := runnable(r, "cpu"))]))
def test_clean_cases_are_silent_also_where_relations_cross_the_filters_shapes(case: Case) -> None:
    judged = Judge(recipes(), load_ledger()).judge(case)
    assert not judged.causes, judged.causes[0].sentence()


@pytest.mark.heavy
@settings(ONCE, max_examples=20)
@given(direct_cases([able for r in [load_recipes([FOLDER])[NAME]] if (able := runnable(r, "cpu"))]))
def test_relations_of_a_single_linear_cross_the_filters_shapes_in_silence(case: Case) -> None:
    judged = Judge(recipes(), load_ledger()).judge(case)
    assert not judged.causes, judged.causes[0].sentence()


def test_scripts_take_what_the_folders_other_files_define(scripts: RunScript) -> None:
    from narrowfuzz.plants.registry import builtin_faults

    own, case = judge(), case_of(model="attention")
    with builtin_faults()["cast-truncates"].plant():
        cause = own.judge(case).causes[0]
        proof = proven(own, case, cause, ("", "cast-truncates"), scripts)
    assert not proof.why, proof.output


def test_a_folder_without_its_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.py").write_text("X = 1\n")
    with pytest.raises(ValueError, match=r"recipe folder .* has no recipe\.py, which must define"):
        load_recipes([tmp_path])


def test_a_tap_that_sees_nothing_is_said_at_the_first_case() -> None:
    from narrowfuzz.recipe.recipe import no_tap

    blind = judge(tap=no_tap)
    blind.judge(case_of())
    assert "saw 0" in blind.tap_failures[NAME]
    sees = judge()
    sees.judge(case_of())
    assert sees.tap_failures[NAME] == ""
    # there is nothing to see of what the filter leaves alone
    alone = judge(tap=no_tap)
    alone.judge(case_of(k=40))
    assert NAME not in alone.tap_failures
    alone.judge(case_of())  # and then there is
    assert "saw 0" in alone.tap_failures[NAME]


@pytest.mark.parametrize(
    ("name", "only", "wanted"),
    [
        ("wo", ("wq", "wk"), False),
        ("layers.0.wq", ("*.w[qk]",), True),
        ("layers.0.wo", ("!wo",), False),
        ("layers.0.wo", ("wo",), True),
        ("layers.0.wo", ("!*.wo",), False),
        ("layers.0.wq", ("!*.wo",), True),
        ("layers.0.wq", ("layers.*", "!*.wq"), False),
        ("model.feed_forward.w2", ("feed_forward.*",), True),
        ("proj", (), True),
    ],
)
def test_a_filter_is_globs_of_names(name: str, only: tuple[str, ...], wanted: bool) -> None:
    assert named(name, only) is wanted


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("torchao.float8.rowwise", "emulated"),
        ("torchao.float8.tensorwise", "emulated"),
        ("torchao.mxfp8.rceil", "linear"),
        ("torchao.mxfp8.rceil", "wrapper"),
    ],
)
def test_a_shipped_recipe_takes_a_filter_in_its_name(name: str, backend: str) -> None:
    filtered = f"{name}@up,!other"
    own = Judge(load_recipes((), [filtered]), Ledger([]))
    spec = Spec(recipe=filtered, backend=backend, model="mlp_gelu", m=32, k=32, n=32)
    judged = own.judge(Case(spec=spec, data=DataSpec(seed=3)))
    assert not judged.causes, judged.causes[0].sentence()
    assert of(judged.verdicts, "O2", "up") == {"ok"}
    assert of(judged.verdicts, "O2", "down") == {"not_applicable"}
    assert own.as_known(judged.case).spec.recipe == name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("torch.fp32@up", "torch.fp32 takes no filter: its convert has no keyword `only`"),
        ("reference.delayed@up", "reference.delayed takes no filter"),
        ("torchao.float8.rowwize@up", "did you mean 'torchao.float8.rowwise'?"),
    ],
)
def test_a_filter_nobody_takes_is_refused(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"filter|recipe") as caught:
        load_recipes((), [name])
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "backend"),
    [("torchao.float8.rowwise", "emulated"), ("torchao.mxfp8.rceil", "wrapper")],
)
def test_a_script_has_the_filter_in_it(name: str, backend: str, scripts: RunScript) -> None:
    from narrowfuzz.plants.registry import builtin_faults

    filtered = f"{name}@up"
    own = Judge(load_recipes((), [filtered]), Ledger([]))
    spec = Spec(recipe=filtered, backend=backend, model="mlp_gelu", m=32, k=32, n=32)
    fault = "cast-truncates" if "float8" in name else "mx-scale-byte-plus-one"
    with builtin_faults()[fault].plant():
        cause = own.judge(Case(spec=spec, data=DataSpec(seed=3))).causes[0]
    assert cause.at.layer == "up"
    proof = proven(own, Case(spec=spec, data=DataSpec(seed=3)), cause, plant=("", fault),
                   scripts=scripts)  # fmt: skip
    assert not proof.why, proof.output
    assert "'up'" in proof.script
