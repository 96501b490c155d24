"""``report.html``: what it shows, and that nothing from outside is markup in it."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.ledger.ledger import load_entries
from narrowfuzz.report.accepted import Accepted
from narrowfuzz.report.explanation import Answer, Count, Explained, save
from narrowfuzz.report.glossary import WORDS, explained
from narrowfuzz.report.issue import issue_text
from narrowfuzz.report.judged import Judged
from narrowfuzz.report.page import write_page
from narrowfuzz.report.plots import heat_map, histogram, histogram_text
from narrowfuzz.rules import RULES
from narrowfuzz.rules.texts import rows_of
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Present, Refuses, Runs
from narrowfuzz.triage.finding import (
    Bins,
    Element,
    View,
    effect_words,
    promise_of,
    report,
    seen_on,
)
from test_accepted import FINDING, OTHER, SHARE, of, store
from test_nearest import ALIKE

__all__ = ["store"]  # a fixture
SUMMARY: dict[str, Any] = {
    "cases": 100, "specs": 10, "compiles": 2, "seconds": 12.5, "seed": 7, "findings": [{}, {}],
    "judged": {"met": 2, "of": 3}, "first_verdict_seconds": 1.5, "compile_seconds": 30.25,
    "compiled_data_seconds": 20.0, "ledger": True,
    "found": {FINDING.id: {"cases": 17, "seconds": 4.5}},
}  # fmt: skip
ENVIRONMENT: dict[str, Any] = {
    "versions": {"torch": "2.13.0"},
    "checkouts": {"torchao": "/there/torchao"}, "platform": "Linux",
    "machine": {"cpu": ["avx2"], "onednn": "3.12.0", "compiler": "g++ 12.2.0"},
}  # fmt: skip


VIEW = View(
    tensor="output", against="the product of what was multiplied", shape=(96, 6), at=(70, 2),
    wrong=7, largest=0.0625, rows=("001200", "00x 80", "123456") * 16, cell=(35, 2),
    unit="units of what the bound allows", exact=False,
    bins=Bins(none=500, first=-2, step=2, counts=(60, 0, 6), infinite=1),
    elements=(Element(index=(70, 2), x="1.5", code="0x3a = 1.25", wanted="0x3b = 1.375",
                      scale="byte 121", wanted_scale="byte 120"),),
    drawn=True,
)  # fmt: skip


class Read(HTMLParser):
    """The text of a page, its elements, and what it would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.elements, self.fetched = "", [], []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.elements.append((tag, named))
        self.fetched += [named[n] for n in ("src", "srcset", "data", "poster") if named.get(n)]
        if tag in ("link", "use", "image") and named.get("href"):
            self.fetched.append(named["href"])

    def handle_data(self, data: str) -> None:
        self.text += data


def page(
    store: Any, accepted: Accepted = Accepted(), *, environment: Any = ENVIRONMENT,  # noqa: B008
    met: int = 3, share: Judged = SHARE, entries: Any = (ALIKE,), **changes: Any,
) -> Read:  # fmt: skip
    entry = load_entries()[0]
    given = {"applying": [entry], "entries": entries, "options": ["--model", "mine.py:build"]}
    counts: Counter[Any] = Counter({("known", entry.id): met} if met else {})
    write_page(
        of(store, counts, accepted=accepted, share=share, **given), SUMMARY | changes, environment
    )
    read = Read()
    read.feed((store.out / "report.html").read_text())
    return read


def test_of_a_check_the_head_says_how_much_of_what_was_asked_was_done(store: Any) -> None:
    head = re.sub(r"\s+", " ", page(store, first_cases={"ran": 7, "of": 10}).text)
    assert "2 of 3 combinations of recipe, arm and model that were asked for (67 %)" in head
    assert "7 of the 10 cases that a check begins with" in head
    said = "not everything that was asked for was checked"
    assert head.count(said) == 1 and said not in page(store).text
    whole = {"first_cases": {"ran": 10, "of": 10}}
    assert said not in page(store, judged={"met": 3, "of": 3}, **whole).text
    assert said in page(store, judged={"met": 2, "of": 3}, **whole).text


def test_the_verdict_stands_first_and_findings_by_severity(store: Any) -> None:
    read = page(store)
    title = re.sub(r"\s+", " ", read.text)
    assert " 2 new findings (1 high, 1 medium), 1 known issue showed checked" in title
    cards = [named for tag, named in read.elements if tag == "article"]
    assert [card["id"] for card in cards] == [OTHER.id, FINDING.id]
    assert [card["data-level"] for card in cards] == ["2", "1"]
    assert "checked: 2 of 3 combinations" in read.text and "1 suspected" in read.text
    assert f"findings/{FINDING.id} --model mine.py:build" in read.text
    assert "1 of 1" in read.text and "1 of 2" in read.text, "by recipe and arm"


def test_what_a_finding_needs_stands_with_it_once_it_was_asked(store: Any) -> None:
    answer = Answer("bias", Count(0, 20), "needed")
    told = Explained(
        FINDING.id, FINDING.sentence, "the smallest case", Count(20, 20), (answer,), (), (), (),
        "", (),
    )  # fmt: skip
    assert "What it needs, and what makes it go away" not in page(store).text
    save(store.out / "findings" / FINDING.id, told)
    text = page(store).text
    assert text.count("What it needs, and what makes it go away") == 1
    assert "It needs:\n  bias: without it shown on 0 of 20" in text


def test_an_empty_run_says_that_it_says_nothing(tmp_path: Path) -> None:
    from narrowfuzz.report.store import Store

    empty = page(Store(tmp_path / "run"), cases=0, findings=[])
    assert "Nothing was checked: this run has no result" in empty.text
    sound = page(Store(tmp_path / "other"), findings=[])
    assert "Nothing new in what was checked" in sound.text and "asked" not in sound.text


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", '" onmouseover="alert(1)', "</pre><img src=x>", "{{ 7 }}"]
)
def test_nothing_from_outside_is_markup(store: Any, text: str) -> None:
    plain = page(store)
    bad = msgspec.structs.replace(
        FINDING, sentence=f"output {text}", needs=[text], fingerprint=f"O5--{text}",
        view=msgspec.structs.replace(VIEW, tensor=text, against=text, unit=text),
    )  # fmt: skip
    store.add(bad, f"print({text!r})\n# {text}\n")
    read = page(store)
    assert text in read.text
    names = [tag for tag, _ in read.elements]
    assert names.count("script") == 1 and names.count("img") == 0
    handlers = [n for _, named in read.elements for n in named if n.startswith("on")]
    assert handlers == [n for _, named in plain.elements for n in named if n.startswith("on")]


def test_it_needs_no_network(store: Any) -> None:
    read = page(store)
    assert not read.fetched
    source = (store.out / "report.html").read_text()
    assert "@import" not in source and "url(" not in source and "fetch(" not in source


def test_every_term_says_what_it_means(store: Any) -> None:
    read = page(store)
    terms = [named for tag, named in read.elements if named.get("class") == "term"]
    assert len(terms) >= 10 and all(
        term["data-means"] and term["type"] == "button" for term in terms
    )
    assert all(explained(rule.name) for rule in RULES) and all(explained(w) for w in WORDS)
    assert explained("no such word") == ""


def test_the_glossary_says_what_the_page_says() -> None:
    table = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", table, re.MULTILINE))
    both = WORDS.keys() & rows.keys()
    assert both == {"arm", "recipe", "configuration", "suspected", "fingerprint"}
    assert not [word for word in both if not rows[word].startswith(WORDS[word])]


def test_what_does_not_count_says_why(store: Any) -> None:
    read = page(store, Accepted(frozenset({OTHER.fingerprint})))
    assert read.text.count("does not count: in the baseline") == 1


def test_labels_and_landmarks_are_there(store: Any) -> None:
    """What a reader by ear needs: one h1, a language, names for what can be operated."""
    read = page(store)
    names = [tag for tag, _ in read.elements]
    assert names.count("h1") == 1 and names.count("main") == 1
    assert dict(read.elements[0][1]).get("lang") == "en" or any(
        tag == "html" and named.get("lang") == "en" for tag, named in read.elements
    )
    ids = [named["id"] for _, named in read.elements if "id" in named]
    assert len(ids) == len(set(ids))
    for _, named in read.elements:
        if "aria-labelledby" in named:
            assert named["aria-labelledby"] in ids


def plots(read: Read) -> list[dict[str, str | None]]:
    return [named for tag, named in read.elements if tag == "svg"]


def test_a_tensor_is_drawn_and_said_in_words(store: Any) -> None:
    assert not plots(page(store)), "no empty box where there is nothing to see"
    store.add(msgspec.structs.replace(FINDING, view=VIEW), "")
    read = page(store)
    heat, bars = plots(read)
    assert heat["role"] == bars["role"] == "img"
    words = heat["aria-label"] or ""
    assert words in read.text and (bars["aria-label"] or "") in read.text
    assert "output (96 x 6)" in words and "7 of 576 elements" in words and "0.0625" in words
    assert "1 are not finite" in words and "[70, 2]" in words
    kinds = [named.get("class") for tag, named in read.elements if tag in ("path", "rect", "line")]
    assert {"cross", "unjudged", "first", "one", "s8", "within", "over"} <= {*kinds}
    assert "0x3a = 1.25" in read.text
    assert "byte 121" in read.text and "byte 120" in read.text


def test_bars_right_of_one_are_the_wrong_ones() -> None:
    kinds = re.findall(r'class="(within|over)"', histogram(VIEW))
    assert kinds == ["within", "over", "over"]
    exact = msgspec.structs.replace(VIEW, exact=True)
    assert re.findall(r'class="(within|over)"', histogram(exact)) == ["over"] * 3
    assert "no error is allowed" in histogram_text(exact)
    bounded = histogram_text(VIEW)
    assert "no error is allowed" not in bounded and "at 1" in bounded
    for words in (bounded, histogram_text(exact)):
        assert VIEW.unit in words and "500 elements" in words and "with one: 67" in words


def test_a_cell_lies_where_it_is_in_the_tensor() -> None:
    one = msgspec.structs.replace(VIEW, rows=("00", "03"), cell=(1, 1), shape=(2, 2), at=(1, 1))
    (path,) = re.findall(r'<path class="s3" d="M([\d.]+),([\d.]+)h', heat_map(one))
    frame = re.search(r'class="first" x="([\d.]+)" y="([\d.]+)"', heat_map(one))
    assert frame
    (x, y), (left, top) = map(float, path), map(float, frame.groups())
    assert 0 < x - left < 3 and 0 < y - top < 3 and x > 40 and y > 20


def test_what_resembles_it_is_said_not_to_explain_it(store: Any) -> None:
    read = page(store)
    assert "None of these explains it" in read.text and "same recipe family" in read.text
    assert f"narrowfuzz known {ALIKE.id}" in read.text
    unasked = page(store, ledger=False)
    assert "None of these explains it" not in unasked.text
    assert "Run without --no-ledger to compare" in unasked.text


def test_how_fast_and_when_is_said(store: Any) -> None:
    read = page(store)
    assert "after 4.5 s and 17 cases" in read.text
    assert "30 s of compiling, 20 s of running them" in read.text
    speed = read.text[read.text.index("cases a second") :]
    assert speed.startswith("cases a second8.0") and FINDING.fingerprint in speed


def test_the_baseline_is_compared(store: Any) -> None:
    assert "Compared with the baseline" not in page(store).text
    read = page(store, Accepted(frozenset({OTHER.fingerprint, "O2--gone"})))
    part = read.text[read.text.index("Compared with the baseline") :]
    said = re.sub(r"\s+", " ", part)
    assert "New: 2" in said and "In both: 1" in said and "Gone since: 1O2--gone" in said
    assert "not proven to be fixed" in said


def test_a_finding_says_what_it_means_whose_it_is_and_what_to_do(store: Any) -> None:
    read = page(store)
    assert read.text.count("What this means") == read.text.count("What now?") == 2
    assert f"narrowfuzz report {FINDING.id} --issue" in read.text
    assert "the worst output or gradient is off by" in read.text.lower()
    row = rows_of(FINDING.rule)[0]
    assert row.says in read.text and row.why in read.text, "the rule is text, not a tooltip"
    assert "Bits are compared" not in read.text


def test_a_user_s_model_is_told_apart_from_the_library(store: Any) -> None:
    assert "None of your code takes part" in page(store).text
    conversion = "def convert(model):\n    quantize_(model, MXFP8TrainingOpConfig())\n"
    more = {"id": "other", "fingerprint": "O5--other", "needs": ["bias=False"]}
    store.add(msgspec.structs.replace(FINDING, conversion=conversion, **more), "pass\n")
    assert "quantize_(model, MXFP8TrainingOpConfig())" in page(store).text


def test_a_long_script_is_cut_on_the_page_and_named_by_its_file(store: Any) -> None:
    data = "x" * 500_000
    script = "\n".join(["import torch", f"tensors = {data!r}", *["step()"] * 2000, "sys.exit(1)"])
    more = {"id": "long", "fingerprint": "O5--long", "needs": ["bias=False"]}
    store.add(msgspec.structs.replace(FINDING, **more), script)
    read = page(store)
    source = (store.out / "report.html").read_text()
    assert len(source) < 100_000 and "sys.exit(1)" in read.text
    links = [named.get("href") for tag, named in read.elements if tag == "a"]
    assert "findings/long/repro.py" in links


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"effect": "inf", "came": "NaN"}, "is NaN where"),
        ({"effect": "inf", "came": "infinity"}, "is infinite where"),
        ({"effect": "inf", "came": "not zero"}, "is not zero where"),
        ({"effect": 1.0, "came": "nothing"}, "is missing"),
        ({"effect": 1e-3, "expect": Present(("grad_bias",))}, "is missing"),
        ({"effect": 0.25}, "off by 25.0% of its size"),
        ({"effect": 0.25, "scaled": False}, "beyond what rounding costs"),
        ({"effect": 0.25, "at": At(what="function")}, "this backward returns is off by 25.0%"),
        ({"effect": 1e-3}, "could not be measured"),
        ({"effect": 0.0}, "no output or gradient is off by more than a thousandth"),
        ({"effect": 1e-3, "expect": Runs("RuntimeError")}, "fails with an error"),
        ({"effect": 1e-2, "rule": "census"}, "changes the results of training"),
    ],
)
def test_an_effect_is_said_only_as_far_as_it_was_measured(
    fields: dict[str, Any], said: str
) -> None:
    assert said in effect_words(msgspec.structs.replace(FINDING, **fields))


def test_without_the_ledger_nothing_is_called_new(store: Any) -> None:
    read = page(store, ledger=False)
    title = re.sub(r"\s+", " ", read.text)
    assert "2 findings (1 high, 1 medium): 0 new, 0 known, 2 not compared with" in title
    assert read.text.count(f"looks like the known issue {ALIKE.id}") == 1, "of O5, not of O1"
    assert "looks like the known issue" not in page(store).text


def test_known_issues_are_not_said_to_be_absent_where_nobody_asked(store: Any) -> None:
    text = page(store, met=0, ledger=False).text
    assert "None came up" not in text and "listed among the findings" in text


LATE = Refuses("a rule", "AssertionError", "time")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        *(
            ({"expect": Refuses("a rule", "AssertionError", lacking)}, "a usability complaint")
            for lacking in ("layer", "shape", "rule", "clarity")
        ),
        ({"expect": LATE}, "It is a bug of the library, or narrowfuzz is wrong"),
        ({"expect": Refuses("a rule")}, "It is a bug of the library, or narrowfuzz is wrong"),
        ({"rule": "census", "symptom": "hooks lost"}, "Nothing documents what conversion keeps"),
        ({"rule": "census", "symptom": "weights tied"}, "It is a bug of the library"),
        ({}, "It is a bug of the library, or narrowfuzz is wrong about what the library promises"),
    ],
)
def test_whose_it_is_follows_what_the_library_promises(
    fields: dict[str, Any], said: str, store: Any
) -> None:
    finding = msgspec.structs.replace(FINDING, **fields)
    assert promise_of(finding).startswith(said) or said in promise_of(finding)
    store.add(finding, "pass\n")
    text = page(store).text
    assert promise_of(finding) in text
    assert "while the bug is there" not in text and "while this behaviour is there" in text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rule": "census", "symptom": "hooks lost"}, "at conversion, before anything runs"),
        ({"rule": "contract", "expect": LATE}, "does not depend on the data"),
        ({"rule": "R20", "expect": Runs("UnpicklingError")}, "does not depend on the data"),
    ],
)
def test_what_any_data_show_is_said_of_no_data(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    from narrowfuzz.report.store import Store

    finding = msgspec.structs.replace(FINDING, **fields)
    told = report(finding, "again")
    assert f"severity medium, {said}" in told
    alone = Store(tmp_path / "alone")
    alone.add(finding, "pass\n")
    for text in (told, page(alone).text):
        assert said in text.lower() and "normally distributed" not in text
        assert "random data" not in text and "seed 0" not in text
    plain = report(FINDING, "again")
    assert "on normally distributed data" in plain and "random data, seed 0" in plain


def test_the_first_line_says_what_was_tested_and_on_what(store: Any) -> None:
    read = page(store)
    body = read.text[read.text.index("torch 2.13.0") :]
    assert body.startswith("torch 2.13.0, CPU only\n"), "before the verdict"
    assert body.index("2 new findings") < 40
    mx = Judged(frozenset({("torchao.mxfp8.rceil", "eager", "linear")}), ())
    gpu = {"device": {"name": "cuda:0"}}
    emulated = "CPU only, MXFP8 emulated by torchao (CPUs have no MX instructions)\n"
    for more, said in (({}, emulated), (gpu, "torch 2.13.0, device cuda:0\n")):
        page(store, environment=ENVIRONMENT | more, share=mx)
        assert said.strip() + "</p>" in (store.out / "report.html").read_text()


def test_ways_to_run_that_nothing_was_checked_in_are_counted(store: Any) -> None:
    assert "nothing checked" not in page(store).text
    never = tuple(("torchao.float8.rowwise", arm, "linear") for arm in ("ac_full", "aot_eager"))
    page(store, share=Judged(SHARE.met, (*SHARE.never, *never)))
    text = (store.out / "report.html").read_text()
    assert "2 other ways to run: nothing checked" in text
    assert ">aot_eager</button></th>" not in text and ">eager</button></th>" in text


@pytest.mark.parametrize("drawn", [True, False])
def test_of_which_example_the_numbers_are_is_said_once(store: Any, drawn: bool) -> None:
    drawn_case = msgspec.structs.replace(
        FINDING.case, spec=msgspec.structs.replace(FINDING.case.spec, m=96)
    )
    view = msgspec.structs.replace(VIEW, drawn=drawn)
    store.add(msgspec.structs.replace(FINDING, view=view, case=drawn_case), "")
    text = page(store).text
    assert text.count("96 tokens") == drawn and text.count("as it was first found") == drawn
    assert text.count("as the numbers of the title are") == (not drawn)
    assert text.count("The numbers of the title") == drawn


def test_a_finding_that_is_a_known_issue_is_told_apart(store: Any) -> None:
    entry = msgspec.structs.replace(ALIKE, id="that-one", links=("https://example.org/1",))
    known = msgspec.structs.replace(
        FINDING, known_issue=entry.id, why_severity="that of the known issue that-one: rare"
    )
    store.add(known, "pass\n")
    store.add(msgspec.structs.replace(OTHER, known_issue=""), "pass\n")
    read = page(store, entries=[entry, ALIKE], met=0, ledger=False)
    title = re.sub(r"\s+", " ", read.text)
    assert "2 findings (1 high, 1 medium): 1 new, 1 known (1 issue, listed because" in title
    assert f"this is the known issue {entry.id}" in read.text and entry.workaround in read.text
    assert "Nearest known issues" not in read.text, "what it is, is no longer only like others"
    assert "Medium" not in read.text and "That of the known issue that-one: rare" in read.text
    links = [named.get("href") for tag, named in read.elements if tag == "a"]
    assert "https://example.org/1" in links
    assert read.text.count("--issue") == 1, "the one that nobody knows is to be reported"


def test_how_much_is_known_is_counted_where_nothing_is_new(tmp_path: Path) -> None:
    from narrowfuzz.report.store import Store

    assert "Nothing new in what was checked, 1 known issue showed" in re.sub(
        r"\s+", " ", page(Store(tmp_path / "other"), findings=[]).text
    )


def test_other_rules_that_a_rule_names_say_what_they_mean(store: Any) -> None:
    read = page(store)
    told = {named["data-means"] for tag, named in read.elements if named.get("class") == "term"}
    assert {explained("O3"), explained("bound 3.2")} <= told, "named by O5"
    blind = rows_of("O5")[0].blind
    assert blind[1:] in read.text, "the text itself is whole"


@pytest.mark.parametrize("reach", ["binade_edges", "mined", "scale_ends"])
def test_what_has_no_scales_is_not_said_to_have_edges_of_them(reach: str) -> None:
    scaled = msgspec.structs.replace(FINDING, reach=reach)
    assert "scale" in seen_on(scaled) or "rounding" in seen_on(scaled)
    plain = seen_on(msgspec.structs.replace(scaled, scaled=False))
    assert "scale" not in plain and "rounding" not in plain and plain.startswith("on ")


def test_a_backend_is_said_in_words(store: Any) -> None:
    store.add(msgspec.structs.replace(FINDING, backend_words="by an abacus"), "pass\n")
    assert "real: by an abacus" in page(store).text
    assert "real: by an abacus" in report(
        msgspec.structs.replace(FINDING, backend_words="by an abacus"), ""
    )


def test_what_a_user_s_own_model_has_in_any_case_is_no_condition() -> None:
    """Also where the file of the model has not been named, as `report` asks for none."""
    name = "mine.py:build#0"
    spec = msgspec.structs.replace(FINDING.minimal.spec, model=name, bias=True)
    minimal = msgspec.structs.replace(FINDING.minimal, spec=spec)
    needs = ["bias=True", f"model={name}", "steps=2"]
    mine = msgspec.structs.replace(FINDING, minimal=minimal, needs=needs)
    assert "required to reproduce: steps 2\n" in report(mine, "")
    bare = msgspec.structs.replace(mine, needs=needs[:2])
    assert "required to reproduce" not in report(bare, "")
    assert "bias" in report(FINDING, ""), "a linear of ours may have one or not"


def test_what_nothing_was_tried_without_is_not_said_to_be_required(store: Any) -> None:
    """The search for a smaller example may end before it has tried to leave out a reload."""
    whole = msgspec.structs.replace(FINDING, needs=["reload"], untried=[])
    cut = msgspec.structs.replace(whole, untried=["without event 4 (reload)"])
    for finding, title in ((whole, "required to reproduce"), (cut, "may be required to reproduce")):
        assert f"  {title}: reload\n" in report(finding, "")
        assert f"{title.capitalize()}: reload." in issue_text(finding, "pass\n")
    store.add(cut, "pass\n")
    assert re.search(r"may be required to reproduce\s*reload", page(store).text)


def test_ways_to_run_stand_in_the_order_of_the_ladder(store: Any) -> None:
    arms = [*BY_NAME][:6]
    share = Judged(
        frozenset(("torchao.float8.rowwise", arm, "linear") for arm in reversed(arms)), ()
    )
    page(store, share=share)
    text = (store.out / "report.html").read_text()
    heads = re.findall(r"<th scope=.col.><button [^>]*>([^<]*)</button></th>", text)
    assert heads == arms
