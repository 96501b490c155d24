"""Faults in TransformerEngine's own Python: each plants and lifts again, and drawn schedules find
them; all in one process of its own."""

from __future__ import annotations

import functools

import pytest
from fresh import on_transformer_engine
from narrowfuzz.plants.patching import te_calls
from narrowfuzz.plants.registry import builtin_faults, builtin_plants
from te_on_cpu.environment import DEFAULT

FAULTS = sorted(id for id in builtin_faults() if id.startswith("te-"))
CONTROLS = sorted(
    p.id for p in builtin_plants().values() if p.legal and p.recipes == ("te.experts",)
)
FOUND_BY = {
    "te-update-lost-at-evaluation": "O14",
    "te-current-power-of-two": "O2",
    "te-mx-one-code": "O3",
    "te-block-any-scale": "O2",
    "te-block-lines-of-weights": "O20",
    "te-block-tail-scale": "O3",
    "te-fp4-lines-of-weights": "O20",
    "te-fp4-amax-untransformed": "O3",
    "te-fp4-without-signs": "O2",
    "te-fp4-forward-by-chance": "O2",
    "te-fp4-gradient-to-nearest": "O2",
    "te-fp4-noise-then-nearest": "O2",
    "te-fp4-one-number": "O2",
}


pytestmark = pytest.mark.xdist_group("te faults")


@functools.cache
def told() -> dict[tuple[str, str], str]:
    """(what was tried, fault) -> what it showed."""
    lines = [line.split(" ", 2) for line in on_transformer_engine("te_faults_checks.py")]
    return {
        (what[0], what[1]): what[2]
        for what in lines
        if what[0] in ("PLANTED", "JUDGED", "HUNTED") and len(what) == 3
    }


@pytest.mark.parametrize("fault", FAULTS)
def test_plants_and_lifts(fault: str) -> None:
    assert told()["PLANTED", fault] == "ok"


@pytest.mark.parametrize("control", CONTROLS)
def test_a_legal_rewrite_is_silent(control: str) -> None:
    assert told()["JUDGED", control] == "ok"


@pytest.mark.parametrize("fault", FOUND_BY)
def test_found_in_a_few_schedules(fault: str) -> None:
    assert FOUND_BY[fault] in told()["HUNTED", fault].split()


def test_old_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_ON_CPU_VERSION", "1.12.0")
    with pytest.raises(ValueError, match=f"--te-version {DEFAULT}"), te_calls({}):
        pass


def test_ids_recipes_and_links() -> None:
    for fault in builtin_faults().values():
        if fault.id.startswith("te-"):
            assert all(recipe.startswith("te.") for recipe in fault.recipes), fault.id
            assert fault.source.startswith("https://"), fault.id
