"""torchao's recipes on releases before the one that is installed: what each has, and that a
campaign on it finds what later ones fixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fresh import command
from narrowfuzz.case.spec import Spec
from narrowfuzz.machine.overlay import folder_of
from narrowfuzz.recipe.recipe import Recipe, obstacles
from packaging.version import Version
from samples import every_recipe

FLOAT8, ROWWISE = "torchao.float8.rowwise", "torchao.float8.rowwise_gw_hp"
FLOOR, RCEIL, WGRAD = (
    f"torchao.mxfp8.{name}" for name in ("floor", "rceil", "rceil_wgrad_with_hp")
)


def of_release(monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> Recipe:
    """A recipe as it is where that release is installed, but for what it converts with."""
    recipe = every_recipe()[name]
    names = _globals(recipe)
    release = Version(version)
    monkeypatch.setitem(names, "RELEASE", release)
    known = {
        "HAS_MXLINEAR": Version("0.17") > release,
        "BEFORE_0_12": Version("0.12") > release,
        "BEFORE_0_13": Version("0.13") > release,
    }
    for key, value in known.items():
        if key in names:
            monkeypatch.setitem(names, key, value)
    return recipe


def _globals(recipe: Recipe) -> dict[str, Any]:
    return recipe.unavailable.func.__globals__  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("name", "version", "backend", "says"),
    [
        (FLOOR, "0.9.0", "linear", ""),
        (RCEIL, "0.11.0", "linear", "torchao 0.11.0 scales by floor alone"),
        (RCEIL, "0.16.0", "linear", ""),
        (RCEIL, "0.16.0", "wrapper", "torchao 0.16.0 has MXLinear alone, which quantises all"),
        (WGRAD, "0.16.0", "linear", "torchao 0.16.0 has MXLinear alone, which quantises all"),
        (RCEIL, "0.17.0", "linear", "torchao 0.17.0 has but a wrapper of weights"),
        (RCEIL, "0.17.0", "native", "torchao 0.17.0 has but a wrapper of weights"),
        (ROWWISE, "0.11.0", "real", "torchao 0.11.0 rounds before it applies scales that are no"),
        (ROWWISE, "0.11.0", "emulated", ""),
        (FLOAT8, "0.11.0", "emulated", ""),
    ],
)
def test_what_a_release_lacks_is_unavailable(
    name: str, version: str, backend: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = obstacles(of_release(monkeypatch, name, version), "cpu").get(backend, "")
    assert why.startswith(says) and bool(why) == bool(says)


def test_plans_are_those_of_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec(recipe=FLOAT8, backend="real")
    assert every_recipe()[FLOAT8].plan(spec).gemms["output"].rounding == ("bf16", "out")
    old = of_release(monkeypatch, FLOAT8, "0.11.0")
    assert old.plan(spec).gemms["output"].rounding == ("out",)
    old = of_release(monkeypatch, FLOAT8, "0.12.0")
    assert old.plan(spec).gemms["output"].rounding == ("bf16", "out")
    spec = Spec(recipe=ROWWISE, backend="emulated")
    for version, rounded in (("0.12.0", False), ("0.13.0", True)):
        gemms = of_release(monkeypatch, ROWWISE, version).plan(spec).gemms
        operands = [gemms["output"].a, gemms["output"].b, gemms["grad_input"].b]
        assert [one.scale.power_of_two for one in operands] == [rounded] * 3  # type: ignore[union-attr]
        assert [one.granularity for one in operands] == ["row", "row", "tensor"]
        assert (gemms["output"].scale_roundings == 0) is rounded
    spec = Spec(recipe=FLOOR, backend="linear")
    assert every_recipe()[FLOOR].plan(spec).gemms["output"].a.scale.inf_byte == 247  # type: ignore[union-attr]
    old = of_release(monkeypatch, FLOOR, "0.9.0")
    assert old.plan(spec).gemms["output"].a.scale.inf_byte == 254  # type: ignore[union-attr]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("version", "recipe", "cases", "finds"),
    [
        # a floor of a logarithm that was rounded up
        ("0.9.0", "torchao.mxfp8.floor", 60, "O3--operand--eager--scale byte +1--torchao.mxfp8"),
        # an infinite gradient of one row made every weight NaN
        ("0.11.0", FLOAT8, 500, "O4--operand--eager--amax--torchao.float8"),
        ("0.12.0", ROWWISE, 60, ""),
        ("0.14.1", "torchao.mxfp8.rceil", 60, ""),
        ("0.16.0", "torchao.mxfp8.even", 60, ""),
        ("0.17.0", "torchao.mxfp8.floor", 60, ""),
    ],
)
def test_a_campaign_on_an_older_release(
    version: str, recipe: str, cases: int, finds: str, tmp_path: Path
) -> None:
    """Its operands are seen, so that each of the three products is judged; and of rules of operands
    it breaks none but that which a later release fixed."""
    try:
        folder_of(f"torchao=={version}")
    except ValueError as why:
        pytest.skip(str(why))
    given = ("--with", f"torchao=={version}", "--recipe", recipe, "--cases", str(cases))
    out = tmp_path / "run"
    command("run", *given, "--seed", "1", "--arm", "eager", "--out", out, code=None, seconds=580)
    summary = json.loads((out / "summary.json").read_text())
    found = {json.loads(f.read_text())["fingerprint"] for f in out.glob("findings/*/explain.json")}
    of_operands = {name for name in found if "--operand--" in name}
    assert summary["cases"] == cases
    assert finds in of_operands if finds else not of_operands, found
