"""Every case is of one kind, and whoever has rows for kinds has one for each."""

from __future__ import annotations

import pytest
from narrowfuzz.case.kind import KINDS, kind_of
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Spec
from narrowfuzz.judge.observe import _OBSERVED
from narrowfuzz.rules import RULES
from narrowfuzz.triage.effect import _EFFECTS
from narrowfuzz.triage.forms import _FORMS

R = "torch.bf16"


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (Spec(recipe=R), "linear"),
        (Spec(recipe=R, steps=2), "model"),
        (Spec(recipe=R, autocast=True), "model"),
        (Spec(recipe=R, model="mlp_gelu"), "model"),
        (Spec(recipe=R, sharding=Sharding(data=2)), "mesh"),
        (Spec(recipe=R, model="mlp_gelu", sharding=Sharding(tensor=2)), "mesh"),
        (Spec(recipe=R, sharding=Sharding(stages=2)), "pipeline"),
        (Spec(recipe=R, model="attention", sharding=Sharding(context=2)), "context_parallel"),
        (Spec(recipe=R, model="library_linear"), "layers"),
        (Spec(recipe=R, model="library_linear", sharding=Sharding(data=2)), "layers"),
    ],
)
def test_a_case_is_of_the_kind_that_it_is_judged_as(spec: Spec, kind: str) -> None:
    assert kind_of(spec).name == kind


def test_every_kind_is_run_judged_shown_and_weighed() -> None:
    assert {*_OBSERVED} == {*_FORMS} == {*_EFFECTS} == {*KINDS}
    assert {kind for rule in RULES for kind in rule.cases} == {*KINDS}
