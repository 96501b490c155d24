"""A finding: first cause, minimal case, fingerprint, severity and what triage learnt."""

from __future__ import annotations

import hashlib
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from narrowfuzz.case.events import Backward, Forward, Stimulus
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Case, dump_case
from narrowfuzz.ledger.severity import SMALL, Severity, Use, Weighed, weighed
from narrowfuzz.models.catalog import FIXED_BY_OWN, MODELS, title_of
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Expect, Given, Present, Refuses, Runs
from narrowfuzz.trace.verdict import Verdict

Flake = Literal["always", "per process", "flaky"]
#: What came in place of the numbers of a result; "": other numbers.
Came = Literal["", "NaN", "infinity", "a number", "not zero", "nothing"]
#: Why a finding is suspected whose script could not be run before the run ended.
OUT_OF_TIME = "the run ended before its script was run"


class State(msgspec.Struct, frozen=True):
    """One slot after one event; what is not finite stands as text."""

    event: int
    scale: float | str
    window: list[float | str]


class Story(msgspec.Struct, kw_only=True):
    """What a stateful finding's minimal schedule did."""

    #: What is trained, then the schedule, one line an event.
    lines: list[str]
    #: The event that first broke the rule, as its number and as a line; -1 if the rule names none.
    event: int
    broke: str
    #: The slot that is followed, and its state over the events, arm by arm.
    slot: str
    states: dict[str, list[State]]


class Bins(msgspec.Struct, frozen=True, kw_only=True):
    """How many elements are how far off, in units."""

    #: Not at all.
    none: int
    #: Bar i counts those above 2^(first + i * step), up to 2^step times that.
    first: int
    step: int
    counts: tuple[int, ...]
    #: Not finite.
    infinite: int


class Element(msgspec.Struct, frozen=True, kw_only=True):
    """One element of an operand that was cast, in words; "" is not known."""

    index: tuple[int, int]
    #: Before the cast.
    x: str
    code: str
    wanted: str
    scale: str
    wanted_scale: str


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The guilty tensor, made small: what came against what was expected."""

    #: What is shown, and what it is held against.
    tensor: str
    against: str
    shape: tuple[int, ...]
    #: The first bad element, how many there are, and the largest finite error.
    at: tuple[int, ...]
    wrong: int
    largest: float
    #: Its heat map (``view.heat``), and the first bad element's cell in it.
    rows: tuple[str, ...]
    cell: tuple[int, int]
    #: What errors are counted in, and whether any error at all is too much.
    unit: str
    exact: bool
    bins: Bins
    elements: tuple[Element, ...] = ()
    #: True: of the case as it was drawn; False: of the smallest one.
    drawn: bool = False


class Finding(msgspec.Struct, kw_only=True):
    """One first cause."""

    id: str
    fingerprint: str
    severity: Severity
    recipe: str
    #: Where it was seen, as a user asks for it.
    device: str = "cpu"
    #: Sentence pieces of the verdict.
    rule: str = msgspec.field(name="oracle")
    arm: str
    role: str
    symptom: str
    sentence: str
    #: Where, what came, what was expected and what that rests on.
    at: At = At()
    got: str = ""
    expect: Expect | None = None
    given: tuple[Given, ...] = ()
    strength: str
    reach: str
    case: Case
    minimal: Case
    flake: Flake
    attempts: int = 0
    untried: list[str] = msgspec.field(default_factory=list)
    script_output: str = ""
    environment: dict[str, Any] = msgspec.field(default_factory=dict)
    story: Story | None = None
    #: None: there is no tensor to show.
    view: View | None = None
    #: Why no script shows it; "": one does.
    why_suspected: str = ""
    #: Excess error of the worst output or gradient: see narrowfuzz.ledger.severity; "inf" as text.
    effect: float | str = 0.0
    #: False: of a linear, or a recipe, that is not quantised.
    scaled: bool = True
    #: What the backend of its configuration is, in words; "" if the recipe says none.
    backend_words: str = ""
    #: What came there, if a share does not say it.
    came: Came = ""
    #: How its severity follows, in words; "" in findings of older releases.
    why_severity: str = ""
    #: The ledger's entry that it is; "": none explains it; None: nobody asked.
    known_issue: str | None = None
    #: What its minimal case needs, besides what every case has.
    needs: list[str] = msgspec.field(default_factory=list)
    #: Of a refusal: what it goes away with, each tried.
    avoided: list[str] = msgspec.field(default_factory=list)
    #: What of the case as it was drawn it does without.
    needless: list[str] = msgspec.field(default_factory=list)
    #: Of NaN or infinity: where ``watch`` sees the first, in its script.
    first_bad: list[str] = msgspec.field(default_factory=list)
    #: Source of what converts the model, the Spec's values put in; "" where nothing does.
    conversion: str = ""
    #: Other divergences that chance made of it: no script shows them.
    seen_as: list[str] = msgspec.field(default_factory=list)


@dataclass(frozen=True)
class Triaged:
    """A finding and its script."""

    finding: Finding
    script: str

    @property
    def confirmed(self) -> bool:
        """True if the script shows the divergence in a fresh process."""
        return not self.finding.why_suspected


def finding_id(fingerprint: str, minimal: Case) -> str:
    """Short hash of what was found and where: two causes may share their smallest case."""
    return hashlib.sha256(fingerprint.encode() + dump_case(minimal)).hexdigest()[:12]


def reach_of(case: Case) -> str:
    """The tamest data class that shows it; the minimiser has already looked for a tamer one."""
    data = case.data
    if any(_special(s.bits) for s in data.spikes):
        return "inf_nan"
    if data.regime != "wild":  # a ladder is one large product beside small ones
        return "gaussian" if data.regime == "lattice" else "outlier"
    if data.values != "gaussian":
        return data.values
    if data.spikes:
        return "binade_edges"  # one planted value: what a spike class would have to hit
    sent = {e.values for e in case.spec.events if isinstance(e, Forward | Backward)}
    return next((reach for values, reach in _STIMULUS_REACH if values in sent), "gaussian")


#: Wildest first: what a training must send for the finding to show.
_STIMULUS_REACH: tuple[tuple[Stimulus, str], ...] = (
    ("inf", "inf_nan"),
    ("spike", "outlier"),
    ("zero", "zero_rows"),
)


def _special(bits: str) -> bool:
    return (int(bits, 16) & 0x7F800000) == 0x7F800000


def severity_of(verdict: Verdict, case: Case, effect: float) -> Severity:
    """The severity of a finding that no entry explains."""
    return weighed_of(verdict, case, effect).severity


def weighed_of(verdict: Verdict, case: Case, effect: float) -> Weighed:
    """Its severity, and why. The use is taken for documented unless the library said no; empty
    dimensions are rare."""
    spec, use = case.spec, cast(Use, "documented")
    if isinstance(verdict.expect, Refuses) and verdict.expect.lacking != "time":
        use = "limitation"
    elif 0 in (spec.tokens, spec.k, spec.n):
        use = "rare"
    loud = verdict.status in ("crashed", "hung")
    return weighed("loud" if loud else "silent", effect, reach_of(case), use)


def replay_command(folder: Path, options: Sequence[str]) -> str:
    """What runs a finding again from the folder in which its run was started."""
    return shlex.join(["narrowfuzz", "replay", str(folder), *options])


#: What each class of data is, in words.
DATA_WORDS = {
    "gaussian": "normally distributed data",
    "zero_rows": "data with rows of zeros",
    "outlier": "data with outliers",
    "outlier_rows": "data with rows of outliers",
    "heavy_tail": "data with heavy tails",
    "binade_edges": "data at the edges where a scale changes",
    "mined": "data at the edges of rounding",
    "inf_nan": "data with infinities or NaN",
    "near_max": "data near the largest number",
    "scale_ends": "data at the ends of the scale's range",
    "subnormal": "subnormal data",
    "equal": "data of equal numbers",
    "aligned": "data with rows along the weights",
}
#: The same of what is not quantised, where no scale and no code makes an edge.
_UNSCALED_WORDS = {
    "binade_edges": "data next to powers of two",
    "mined": "data next to powers of two",
    "scale_ends": "very large and very small data",
}
#: What each regime of data is, in words.
REGIME_WORDS = {
    "wild": "random data",
    "lattice": "data whose sums are exact",
    "ladder": "data that tell accumulators apart",
}


def seen_on(finding: Finding) -> str:
    """The data that it was seen on, in words that follow a comma; of what any data show, that."""
    words = DATA_WORDS if finding.scaled else DATA_WORDS | _UNSCALED_WORDS
    return _data_free(finding) or f"on {words[finding.reach]}"


def _data_free(finding: Finding) -> str:
    """Why no data matter; "" where they may. Of an error that no rule about shapes or loading
    foresees nobody knows."""
    if finding.rule == "census":
        return "at conversion, before anything runs"
    by_load = finding.rule == "R20" and isinstance(finding.expect, Runs)
    return "does not depend on the data" * (by_load or isinstance(finding.expect, Refuses))


def smallest_of(finding: Finding) -> str:
    """Its smallest example in words: the size, and the data where they matter."""
    return (_size_of if _data_free(finding) else example_of)(finding.minimal)


#: What conversion takes from a model, and no library says that it keeps.
_KEPT = frozenset(
    {
        "own forward lost",
        "forward changed",
        "hooks lost",
        "attributes lost",
        "attributes changed",
        "parameter hooks lost",
        "parameter attributes lost",
    }
)


def promise_of(finding: Finding) -> str:
    """Whose it is where none of a user's code takes part: what the library promises about it."""
    expect = finding.expect
    if isinstance(expect, Refuses) and expect.raised and expect.lacking != "time":
        return (
            "The library promises nothing about this message: it is a usability complaint, not a "
            "wrong result"
        )
    if finding.rule == "census" and finding.symptom in _KEPT:
        return "Nothing documents what conversion keeps; we expect a module swap to keep it"
    return "It is a bug of the library, or narrowfuzz is wrong about what the library promises"


def configuration_of(finding: Finding) -> str:
    """What was converted, how it was run, and where."""
    spec = finding.minimal.spec
    backend = f" ({spec.backend})" if spec.backend else ""
    where = "" if finding.device == "cpu" else f", on {finding.device}"
    return f"{spec.recipe}{backend}, {BY_NAME[finding.arm].words}{where}"


def backend_of(finding: Finding) -> str:
    """What its backend is, in words; "" if nobody says."""
    said = finding.backend_words
    return f"{finding.minimal.spec.backend}: {said}" if said else ""


def example_of(case: Case) -> str:
    """The size of a case and its data in words."""
    return f"{_size_of(case)}, {REGIME_WORDS[case.data.regime]}, seed {case.data.seed}"


def _size_of(case: Case) -> str:
    spec, model = case.spec, MODELS.get(case.spec.model)
    if model is not None and model.inputs:
        return f"{spec.model.partition('#')[0]} called with {', '.join(model.inputs)}"
    tokens = f"{spec.tokens} token{'s' * (spec.tokens != 1)}"
    sizes = f"{spec.k} in, {spec.n} out"
    if spec.layer or spec.alone:
        more = f", {spec.n} {model.columns}" if model is not None and model.columns else ""
        sizes = f"width {spec.k}{more}"
    return f"{tokens}, {sizes}, {spec.dtype}"


def conditions(needs: Sequence[str]) -> str:
    """What a case needs, in one line that can be read."""
    return ", ".join(map(_condition, needs))


def needed(finding: Finding) -> str:
    """What its smallest example needs, less what a user's own model has in any case."""
    given = {"model", *FIXED_BY_OWN} if title_of(finding.minimal.spec.model) else set()
    return conditions([need for need in finding.needs if need.partition("=")[0] not in given])


def _condition(need: str) -> str:
    name, equals, value = need.partition("=")
    if name == "model" and equals:
        return f"the model {model_words(value)}"
    if value in ("True", "False"):
        return f"{'' if value == 'True' else 'no '}{name.replace('_', ' ')}"
    return f"{name.replace('_', ' ')}{' ' * bool(equals)}{value}"


def model_words(name: str) -> str:
    """A model's name, a user's without the hash of its file, and what it is, if it is one of
    ours."""
    model = MODELS.get(name)
    said = f" ({model.title})" if model is not None and not model.own else ""
    return name.partition("#")[0] + said


_OF_CENSUS: dict[Severity, str] = {
    "high": "conversion changed something that changes the results of training",
    "medium": "conversion changed something that may change training, if anything uses it",
    "low": "conversion changed something that changes no number by itself",
}


_CAME: dict[Came, str] = {
    "NaN": "an output or a gradient is NaN where a number is expected",
    "infinity": "an output or a gradient is infinite where a finite number is expected",
    "a number": "an output or a gradient is a number where NaN is expected",
    "not zero": "an output or a gradient is not zero where nothing but zeros is expected",
    "nothing": "an output or a gradient is missing",
}


def effect_words(finding: Finding) -> str:
    """How far the worst output or gradient is off, in words."""
    effect = float(finding.effect)
    if isinstance(finding.expect, Runs | Refuses):
        return "it fails with an error or an end of the process, so no wrong number goes unseen"
    if finding.rule == "census":
        return _OF_CENSUS[weighed("silent", effect, "gaussian").severity]
    if isinstance(finding.expect, Present):
        return "a result that training needs is missing"
    if finding.came:
        return _CAME[finding.came]
    if effect == SMALL:
        return "how far outputs and gradients are off could not be measured"
    if math.isinf(effect):  # of a release that did not say what came
        return "an output or a gradient is off by more than any number says"
    off = f"{effect:.1%}" if effect < 10 else f"{effect:.3g} times"
    if finding.at.what == "function":
        return f"what this backward returns is off by {off} of its size"
    usual = "the recipe itself costs" if finding.scaled else "rounding costs"
    beyond = f"of its size, beyond what {usual}"
    if effect < 0.001:
        return f"no output or gradient is off by more than a thousandth {beyond}"
    return f"the worst output or gradient is off by {off} {beyond}"


def known_words(entry: str) -> str:
    """What a finding is that this entry explains."""
    return f"this is the known issue {entry}"


def report(finding: Finding, replay: str) -> str:
    """What a failure says: what it means, the configuration, what it takes, the smallest example,
    and ``replay``, the one command."""
    known = []
    if entry := finding.known_issue:
        known = [
            f"  {known_words(entry)}, and the severity is that issue's, not measured here: "
            f"narrowfuzz known {entry}"
        ]
    lines = [
        f"{finding.sentence}",
        f"  severity {finding.severity}, {seen_on(finding)}",
        *known,
        f"  configuration: {configuration_of(finding)}",
        *([f"    {backend_of(finding)}"] if finding.backend_words else []),
        f"  smallest example: {smallest_of(finding)}",
    ]
    if finding.story is not None:
        lines += [f"    {line}" for line in finding.story.lines]
    if needs := needed(finding):
        lines.append(f"  required to reproduce: {needs}")
    if finding.needless:
        lines.append(f"  still fails without: {conditions(finding.needless)}")
    lines += [f"  {line}" for line in finding.first_bad]
    lines += [f"  does not happen with: {what}" for what in finding.avoided]
    if finding.flake != "always":
        lines.append(f"  reproduces {FLAKE_WORDS[finding.flake]}")
    lines += [f"  also seen, not each time, as: {other}" for other in finding.seen_as]
    return "\n".join(
        [
            *lines,
            f"  found by: narrowfuzz rule {finding.rule}",
            f"  replay: {replay}",
            f"  id {finding.id}, fingerprint {finding.fingerprint}",
        ]
    )


#: When it shows, in words.
FLAKE_WORDS: dict[Flake, str] = {
    "always": "every time",
    "per process": "in every new process, but not twice in one",
    "flaky": "sometimes",
}
