"""The ledger: loading and matching. The entries themselves are run by other tests."""

from __future__ import annotations

import importlib.metadata
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import narrowfuzz.ledger.ledger
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.ledger.ledger import Entry, Ledger, load_entries, load_ledger, stands
from narrowfuzz.recipe.content import content_dir
from narrowfuzz.report.listing import known_command
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Within, bits
from narrowfuzz.trace.verdict import Verdict, fingerprint

TORCH = importlib.metadata.version("torch").split("+")[0]
FIELDS: dict[str, Any] = {
    "id": "an-entry",
    "title": "scale one too small",
    "explanation": "to_mx divides where it should multiply",
    "expected": "the scale that the format's definition names",
    "workaround": "none known",
    "links": ["https://example.org/1"],
    "symptom": "silent",
    "effect": 0.5,
    "data": "gaussian",
    "use": "documented",
    "documentation": "README: 'converts every linear'",
    "hardware": ["cpu"],
    "recipes": ["torchao.mxfp8.*"],
    "versions": {"torch": f"=={TORCH}"},
    "review": "2027-01-01",
    "script": "an-entry.py",
    "matches": [{"fingerprints": ["O3--operand--*--torchao.mxfp8"]}],
}
SPEC = Spec(recipe="torchao.mxfp8.floor", backend="wrapper")
CASE = Case(spec=SPEC, data=DataSpec())
FINGERPRINT = "O3--operand--eager--scale byte one too small--torchao.mxfp8"
VERDICT = Verdict("O5", "eager", "output", "diverged", "wrong value", got="0.5")


def never(cure: str) -> bool:
    raise AssertionError(f"an entry without a cure was asked for {cure!r}")


def entry(**changes: Any) -> Entry:
    import msgspec

    return msgspec.convert(FIELDS | changes, Entry)


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """write(name, **changes): an entry file in a ledger of its own; None drops a field."""
    monkeypatch.setattr(narrowfuzz.ledger.ledger, "known_dir", lambda: tmp_path)

    def write(name: str, **changes: Any) -> Path:
        path = tmp_path / f"{name}.toml"
        fields = {k: v for k, v in (FIELDS | changes).items() if v is not None}
        path.write_text("\n".join(f"{key} = {_toml(value)}" for key, value in fields.items()))
        return path

    return write


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def test_a_valid_entry_loads_with_its_defaults(known: Any) -> None:
    known("one")
    (loaded,) = load_entries()
    assert loaded == entry(folder=loaded.folder) and loaded.path.parent == Path(loaded.folder)
    assert (loaded.backends, loaded.deviation, loaded.when) == (("*",), "", {})
    assert load_ledger().entries == (loaded,)


def test_an_empty_ledger_is_a_ledger(known: Any) -> None:
    assert load_ledger().match(FINGERPRINT, CASE, VERDICT, never) == ""


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"surprise": 1}, "surprise"),
        ({"title": None}, "title"),
        ({"versions": ["torch"]}, "versions"),
        ({"recipes": "torch.fp32"}, "recipes"),
        ({"deviation": "byte_zero_is_purple"}, "byte_zero_is_purple"),
        ({"versions": {"torch": "two point thirteen"}}, "two point thirteen"),
        ({"versions": {"no-such-package-here": "newish"}}, "newish"),
        ({"absent_in": {"torch": "older"}}, "older"),
        ({"severity": "high"}, "severity"),
        ({"data": "wild"}, "wild"),
        ({"use": "often"}, "use"),
        ({"shown_by": ["tied parameters"]}, "tied parameters"),
        ({"links": []}, "searched"),
        ({"when": {"phase_of_the_moon": "full"}}, "when: unknown fact 'phase_of_the_moon'"),
        (
            {"matches": [{"fingerprints": ["a"], "when": {"kk": 0}}]},
            "matches[0].when: unknown fact 'kk'",
        ),
        ({"when": {"features": ["reload", "teleport"]}}, "'teleport'"),
    ],
)
def test_a_bad_entry_is_refused_by_file_and_field(
    known: Any, changes: dict[str, Any], names: str
) -> None:
    known("fine")
    known("the-bad-file", **changes)
    with pytest.raises(ValueError, match=r"the-bad-file\.toml") as caught:
        load_ledger()
    assert names in str(caught.value)


@pytest.mark.parametrize("raw", [b"id = \xff\xfe", b"id = ", b"[[["], ids=("binary", "cut", "torn"))
def test_a_file_that_is_no_toml_is_refused_by_name(known: Any, raw: bytes) -> None:
    known("the-bad-file").write_bytes(raw)
    with pytest.raises(ValueError, match=r"the-bad-file\.toml"):
        load_ledger()


@pytest.mark.parametrize(
    ("versions", "holds"),
    [
        ({"torch": f"=={TORCH}"}, True),
        ({"torch": ">=2"}, True),
        ({"torch": ">=2,<2.1"}, False),
        ({"torch": f"!={TORCH}"}, False),
        ({"torch": ">=2", "numpy": "<1"}, False),
        ({"no-such-package-here": ">=0"}, False),
        ({}, True),
    ],
    ids=str,
)
def test_an_entry_holds_for_its_versions_only(
    known: Any, versions: dict[str, str], holds: bool
) -> None:
    known("one", versions=versions)
    assert len(load_entries()) == 1
    assert bool(load_ledger().entries) is holds


def test_a_local_version_suffix_does_not_matter(
    known: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known("one", versions={"torch": "==2.13.0"})
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "2.13.0+cpu")
    assert load_ledger().entries


@pytest.mark.parametrize(
    ("changes", "hits"),
    [
        ({}, True),
        ({"recipes": ["torchao.mxfp8.rceil"]}, False),
        ({"recipes": ["torch.*", "torchao.mxfp8.flo?r"]}, True),
        ({"recipes": []}, False),
        ({"backends": ["linear"]}, False),
        ({"backends": ["linear", "wrap*"]}, True),
        ({"matches": []}, False),
        ({"matches": [{"fingerprints": ["O2--*"]}]}, False),
        ({"matches": [{"fingerprints": ["O2--*", "O3--*--eager--*"]}]}, True),
        ({"matches": [{"fingerprints": ["O2--*"]}, {"fingerprints": ["O3--*"]}]}, True),
        ({"matches": [{"fingerprints": ["o3--*"]}]}, False),
        ({"matches": [{"fingerprints": [FINGERPRINT]}]}, True),
        ({"matches": [{"fingerprints": [FINGERPRINT[:-1]]}]}, False),
        ({"when": {"k": 32, "bias": False}}, True),
        ({"when": {"k": "<32"}}, False),
        ({"matches": [{"fingerprints": ["O3--*"], "when": {"message": "0.5"}}]}, True),
        ({"matches": [{"fingerprints": ["O3--*"], "when": {"message": "*out of range*"}}]}, False),
    ],
    ids=str,
)
def test_an_entry_matches_by_fingerprint_recipe_and_backend(
    changes: dict[str, Any], hits: bool
) -> None:
    assert (
        Ledger([entry(**changes)]).match(FINGERPRINT, CASE, VERDICT, never) == "an-entry"
    ) is hits


def test_a_users_own_entries_are_asked_first(
    known: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    own = tmp_path_factory.mktemp("own")
    known("shipped", id="shipped")
    known("mine", id="mine").rename(own / "mine.toml")
    assert load_ledger().match(FINGERPRINT, CASE, VERDICT, never) == "shipped"
    ledger = load_ledger(folders=[own])
    assert ledger.match(FINGERPRINT, CASE, VERDICT, never) == "mine"
    assert [entry.path.parent == own for entry in ledger.entries] == [True, False]
    with pytest.raises(ValueError, match="there is no entry"):
        load_ledger(folders=[own / "nothing"])


@pytest.mark.parametrize("gone", [True, False])
def test_an_entry_with_a_cure_explains_only_what_is_gone_under_it(gone: bool) -> None:
    asked: list[str] = []

    def cured(cure: str) -> bool:
        asked.append(cure)
        return gone

    ledger = Ledger([entry(cure="without_slp_vectorizer")])
    assert ledger.match("O4--another", CASE, VERDICT, cured) == ""
    assert not asked, "a cure costs a run: nothing that the entry could explain has come"
    assert ledger.match(FINGERPRINT, CASE, VERDICT, cured) == ("an-entry" if gone else "")
    assert asked == ["without_slp_vectorizer"]


def test_the_audits_table_has_every_entry_with_its_severity() -> None:
    text = content_dir("docs").joinpath("ledger.md").read_text()
    rows = re.findall(r"^\| ([a-z][\w.-]+) \| (high|medium|low) \|", text, re.M)
    entries = load_entries()
    assert rows == [(entry.id, entry.severity) for entry in entries]
    new, filed = text.count("| added later, not audited"), [e for e in entries if e.issue]
    causes = {entry.cause or entry.id for entry in filed}
    text = " ".join(text.split())
    assert f"Of the {len(rows)} entries {len(rows) - new} were audited" in text
    assert f"The {new} added after" in text
    assert f"{len(filed)} entries, of {len(causes)} causes" in text


def test_an_id_that_was_merged_names_the_entry_that_it_went_into(
    known: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    known("one", id="one", formerly=["an-older-one"])
    known_command("an-older-one")
    assert capsys.readouterr().out.startswith("an-older-one was merged into one")
    known_command("one")
    assert "was merged" not in capsys.readouterr().out
    known("two", id="an-older-one")
    with pytest.raises(ValueError, match="an-older-one"):
        load_entries()


def test_severity_follows_from_what_the_entry_says() -> None:
    assert entry().severity == "high"
    assert entry(effect=0.005).severity == "medium"
    assert entry(effect=0.0).severity == "low"
    assert entry(symptom="loud", effect=0.0).severity == "medium"
    assert entry(use="rare").severity == "medium" and entry(use="limitation").severity == "low"
    assert entry(data="subnormal").severity == "low"
    assert entry(cured="0.19").severity == "low"
    assert entry(cured="0.19").weighed.why.startswith("torch 0.19 has cured it")
    assert entry(cured="torch 2.15.0").weighed.why.startswith("torch 2.15.0 has cured it")


@pytest.mark.parametrize(
    ("versions", "absent", "how"),
    [
        ({"torch": f"=={TORCH}"}, {}, "named"),
        ({"torch": ">=99"}, {}, "other"),
        ({"torch": ">=99"}, {"torch": f"<={TORCH}"}, "absent"),
        ({"torch": f"=={TORCH}", "no-such-package-here": ">=0"}, {}, "absent"),
    ],
)
def test_an_entry_that_does_not_name_what_is_installed_is_tried_not_assumed(
    versions: dict[str, str], absent: dict[str, str], how: str
) -> None:
    assert stands(entry(versions=versions, absent_in=absent)) == how
    assert stands(entry(versions=versions, absent_in=absent), "cuda") != "named"


@pytest.mark.parametrize("still", [True, False])
def test_a_tried_entry_explains_what_it_still_shows(known: Any, still: bool) -> None:
    known("one", versions={"torch": ">=99"}, deviation="bias_ignored")
    asked: list[str] = []

    def shows(one: Entry) -> bool:
        asked.append(one.id)
        return still

    ledger = load_ledger(shows)
    other = Case(spec=Spec(recipe="torch.fp32"), data=DataSpec())
    assert ledger.match(FINGERPRINT, other, VERDICT, never) == "" and ledger.deviations(other) == {}
    assert not asked, "nothing it could explain has come"
    assert ledger.match(FINGERPRINT, CASE, VERDICT, never) == ("an-entry" if still else "")
    assert ledger.deviations(CASE) == ({"bias_ignored": "an-entry"} if still else {})
    assert set(asked) == {"an-entry"}


def test_the_first_entry_that_fits_explains_a_finding() -> None:
    entries = [entry(id="other", recipes=["torch.*"]), entry(id="a"), entry(id="b")]
    assert Ledger(entries).match(FINGERPRINT, CASE, VERDICT, never) == "a"


def test_an_entry_whose_conditions_suffice_comes_before_one_with_a_cure() -> None:
    """A cure may remove more than what its entry is about, and takes another run."""
    entries = [entry(id="a", cure="without_slp_vectorizer"), entry(id="b")]
    asked: list[str] = []
    ledger = Ledger(entries)
    assert ledger.match(FINGERPRINT, CASE, VERDICT, lambda cure: not asked.append(cure)) == "b"
    assert not asked
    assert Ledger(entries[:1]).match(FINGERPRINT, CASE, VERDICT, lambda cure: True) == "a"
    own = entry(id="own", cure="without_slp_vectorizer", folder="of a user")
    assert Ledger([own, *entries]).match(FINGERPRINT, CASE, VERDICT, lambda cure: True) == "own"
    assert Ledger([own, *entries]).match(FINGERPRINT, CASE, VERDICT, lambda cure: False) == "b"


def test_deviations_are_followed_where_their_entry_holds() -> None:
    ledger = Ledger(
        [
            entry(id="bias", deviation="bias_ignored", backends=["wrapper"]),
            entry(id="none", deviation=""),
            entry(id="elsewhere", deviation="x", recipes=["torch.*"]),
        ]
    )
    assert ledger.deviations(CASE) == {"bias_ignored": "bias"}
    plain = Case(spec=Spec(recipe=SPEC.recipe, backend="linear"), data=DataSpec())
    assert ledger.deviations(plain) == {}


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(
    st.builds(
        dict,
        at=st.builds(
            At,
            name=st.text(),
            layer=st.text(),
            side=st.sampled_from(["", "a", "b"]),
            index=st.lists(st.integers(0, 4096)).map(tuple),
        ),
        got=st.text(),
        expect=st.builds(Within, lo=st.floats().map(bits), hi=st.floats().map(bits)),
        factor=st.floats(),
    )
)
def test_a_fingerprint_leaves_out_shapes_and_values(details: dict[str, Any]) -> None:
    assert fingerprint(replace(VERDICT, **details), "torch") == fingerprint(VERDICT, "torch")


@pytest.mark.parametrize(
    "change", [{"rule": "O15"}, {"arm": "inductor"}, {"role": "grad_input"}, {"symptom": "NaN"}]
)
def test_a_fingerprint_tells_causes_apart(change: dict[str, str]) -> None:
    assert fingerprint(replace(VERDICT, **change), "torch") != fingerprint(VERDICT, "torch")
    assert fingerprint(VERDICT, "torchao.float8") != fingerprint(VERDICT, "torch")


@pytest.mark.parametrize("rule", ["O2", "O3", "O4"])
def test_a_wrong_cast_is_one_finding_whichever_gemm_shows_it(rule: str) -> None:
    verdicts = [replace(VERDICT, rule=rule, role=role) for role in ("output", "grad_weight")]
    assert len({fingerprint(v, "torch") for v in verdicts}) == 1
