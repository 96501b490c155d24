"""The record of a finding: first cause, minimal case, fingerprint, severity and other results of
triage; and its texts for users."""

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
#: What came out in place of a result's numbers; "": other numbers.
Came = Literal["", "NaN", "infinity", "a number", "not zero", "nothing"]
#: The reason why a finding is only suspected if the run ended before its script was run.
OUT_OF_TIME = "the run ended before its script was run"


class State(msgspec.Struct, frozen=True):
    """The state of one slot after one event; numbers that are not finite are text."""

    event: int
    scale: float | str
    window: list[float | str]


class Story(msgspec.Struct, kw_only=True):
    """What happened in the minimal schedule of a finding about a library's own layers."""

    #: A line that states what is trained, then the schedule, one line for each event.
    lines: list[str]
    #: Number of the event that first broke the rule, -1 if the rule names none; and the break as a
    #: line of text.
    event: int
    broke: str
    #: Name of one slot, and by arm its state after each event.
    slot: str
    states: dict[str, list[State]]


class Bins(msgspec.Struct, frozen=True, kw_only=True):
    """A histogram of how far elements are off, in units of what is allowed."""

    #: The number of elements that are not off at all.
    none: int
    #: Bar i counts the elements that are off by more than 2^(first + i * step) units, up to 2^step
    #: times that.
    first: int
    step: int
    counts: tuple[int, ...]
    #: The number of elements whose error is infinite.
    infinite: int


class Element(msgspec.Struct, frozen=True, kw_only=True):
    """One element of an operand that was cast, as text; "" where a value is not known."""

    index: tuple[int, int]
    #: The value before the cast.
    x: str
    code: str
    wanted: str
    scale: str
    wanted_scale: str


class View(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of the guilty tensor: how its values differ from those expected."""

    #: The tensor, and what it is compared with, in words.
    tensor: str
    against: str
    shape: tuple[int, ...]
    #: Index of the first bad element, the number of bad elements, and the largest finite error.
    at: tuple[int, ...]
    wrong: int
    largest: float
    #: The heat map of errors (``view.heat``), and the first bad element's cell in it.
    rows: tuple[str, ...]
    cell: tuple[int, int]
    #: The unit of errors in words, and whether any error at all is too much.
    unit: str
    exact: bool
    bins: Bins
    elements: tuple[Element, ...] = ()
    #: True: the tensor is of the case as it was drawn; False: of the minimal case.
    drawn: bool = False


class Finding(msgspec.Struct, kw_only=True):
    """One first cause, with its minimal case and all that triage found out about it."""

    id: str
    fingerprint: str
    severity: Severity
    recipe: str
    #: The device on which it was seen, as on the command line.
    device: str = "cpu"
    #: Fields of the verdict that make its sentence.
    rule: str = ""
    arm: str
    role: str
    symptom: str
    sentence: str
    #: The place, the value there, the expectation, and the values that the expectation rests on.
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
    #: Changes to a smaller case that the search for one had no time, or no compiles left, to try.
    untried: list[str] = msgspec.field(default_factory=list)
    script_output: str = ""
    environment: dict[str, Any] = msgspec.field(default_factory=dict)
    story: Story | None = None
    #: The guilty tensor; None if there is none to show.
    view: View | None = None
    #: Why no script shows the divergence; "" if one does.
    why_suspected: str = ""
    #: False if its script did not tell whether the divergence shows, or could not be written.
    answered: bool = True
    #: Excess error of the worst output or gradient, as a share of its norm (see
    #: narrowfuzz.ledger.severity); infinity is text.
    effect: float | str = 0.0
    #: False if the linear or the recipe is not quantised.
    scaled: bool = True
    #: The backend of its configuration in words; "" if the recipe does not describe it.
    backend_words: str = ""
    #: The kind of wrong result in place of the worst result's numbers that no relative error
    #: expresses; "" if ``effect`` does.
    came: Came = ""
    #: The steps that led to its severity, in words; "" in findings of older releases.
    why_severity: str = ""
    #: Id of the ledger's entry that explains it; "": none does; None: it was not compared with
    #: known issues.
    known_issue: str | None = None
    #: The conditions of its minimal case (``needs.py``).
    needs: list[str] = msgspec.field(default_factory=list)
    #: For a refusal: changes that make it go away, each tried (``avoid.py``).
    avoided: list[str] = msgspec.field(default_factory=list)
    #: Conditions of the case as it was drawn that the divergence does not need.
    needless: list[str] = msgspec.field(default_factory=list)
    #: For NaN or infinity: where ``watch`` sees the first one in its script, as lines of text.
    first_bad: list[str] = msgspec.field(default_factory=list)
    #: Source of the function that converts the model, with the Spec's values put in; "" if nothing
    #: is converted.
    conversion: str = ""
    #: For nondeterminism: the divergences of other rules that it caused, which no script shows.
    seen_as: list[str] = msgspec.field(default_factory=list)
    #: The old name of ``rule`` in JSON, until 0.2.0.
    oracle: str = ""

    def __post_init__(self) -> None:
        self.rule = self.oracle = self.rule or self.oracle
        if not self.rule:
            raise ValueError("it names no `rule`")


@dataclass(frozen=True)
class Triaged:
    """A finding and the text of its script."""

    finding: Finding
    script: str

    @property
    def confirmed(self) -> bool:
        """True if the script shows the divergence in a fresh process."""
        return not self.finding.why_suspected


def finding_id(fingerprint: str, minimal: Case) -> str:
    """Short hash of fingerprint and minimal case: two causes may share their minimal case."""
    return hashlib.sha256(fingerprint.encode() + dump_case(minimal)).hexdigest()[:12]


def reach_of(case: Case) -> str:
    """The class of the data of a minimal case, which is the tamest that shows the divergence, as
    the minimiser has already tried the tamer ones."""
    data = case.data
    if any(_special(s.bits) for s in data.spikes):
        return "inf_nan"
    if data.regime != "wild":  # a ladder is one large product beside small ones
        return "gaussian" if data.regime == "lattice" else "outlier"
    if data.values != "gaussian":
        return data.values
    if data.spikes:
        return "binade_edges"  # one chosen value, as rare as this class of data
    sent = {e.values for e in case.spec.events if isinstance(e, Forward | Backward)}
    return next((reach for values, reach in _STIMULUS_REACH if values in sent), "gaussian")


#: The values of inputs and output gradients that events send, wildest first, and the reach of each.
_STIMULUS_REACH: tuple[tuple[Stimulus, str], ...] = (
    ("inf", "inf_nan"),
    ("spike", "outlier"),
    ("zero", "zero_rows"),
)


def _special(bits: str) -> bool:
    return (int(bits, 16) & 0x7F800000) == 0x7F800000


def weighed_of(verdict: Verdict, case: Case, effect: float) -> Weighed:
    """The severity of a finding that no entry of the ledger explains, and why. Its use counts as
    documented, but as a limitation if the library refused it, and as rare with empty dimensions."""
    spec, use = case.spec, cast(Use, "documented")
    if isinstance(verdict.expect, Refuses) and verdict.expect.lacking != "time":
        use = "limitation"
    elif 0 in (spec.tokens, spec.k, spec.n):
        use = "rare"
    loud = verdict.status in ("crashed", "hung")
    return weighed("loud" if loud else "silent", effect, reach_of(case), use)


def replay_command(folder: Path, options: Sequence[str]) -> str:
    """The command that runs a finding again, from the folder in which its run was started."""
    return shlex.join(["narrowfuzz", "replay", str(folder), *options])


#: Class of data -> its description, to follow "on".
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
#: The same for what is not quantised, where neither scales nor codes make edges.
_UNSCALED_WORDS = {
    "binade_edges": "data next to powers of two",
    "mined": "data next to powers of two",
    "scale_ends": "very large and very small data",
}
#: Regime of data -> its description.
REGIME_WORDS = {
    "wild": "random data",
    "lattice": "data whose sums are exact",
    "ladder": "data that distinguish accumulators",
}


def seen_on(finding: Finding) -> str:
    """The data that the finding was seen on, or that it does not depend on the data, in words that
    follow a comma."""
    words = DATA_WORDS if finding.scaled else DATA_WORDS | _UNSCALED_WORDS
    return _data_free(finding) or f"on {words[finding.reach]}"


def _data_free(finding: Finding) -> str:
    """Words for a finding that does not depend on the data; "" if it may. An error may, unless it
    is a refusal, which depends on shapes, or rule R20's about loading."""
    if finding.rule == "census":
        return "at conversion, before anything runs"
    by_load = finding.rule == "R20" and isinstance(finding.expect, Runs)
    return "does not depend on the data" * (by_load or isinstance(finding.expect, Refuses))


def smallest_of(finding: Finding) -> str:
    """The minimal case in words: the size, and the data where they may matter."""
    return (_size_of if _data_free(finding) else example_of)(finding.minimal)


#: Changes by a conversion to parts of a model that no library promises to keep.
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
    """Whose fault the finding is where no code of a user takes part: what the library promises."""
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
    """The finding's recipe, backend, arm and device in words."""
    spec = finding.minimal.spec
    backend = f" ({spec.backend})" if spec.backend else ""
    where = "" if finding.device == "cpu" else f", on {finding.device}"
    return f"{spec.recipe}{backend}, {BY_NAME[finding.arm].words}{where}"


def backend_of(finding: Finding) -> str:
    """The finding's backend and its description; "" if the recipe has no description of it."""
    words = finding.backend_words
    return f"{finding.minimal.spec.backend}: {words}" if words else ""


def example_of(case: Case) -> str:
    """The size of a case and its data in words."""
    return f"{_size_of(case)}, {REGIME_WORDS[case.data.regime]}, seed {case.data.seed}"


def _size_of(case: Case) -> str:
    spec, model = case.spec, MODELS.get(case.spec.model)
    if model is not None and model.inputs:
        return f"{spec.model.partition('#')[0]} called with {', '.join(model.inputs)}"
    tokens = f"{spec.tokens} token{'s' * (spec.tokens != 1)}"
    sizes = f"{spec.k} in, {spec.n} out"
    if spec.layer or spec.single_operator:
        more = f", {spec.n} {model.columns}" if model is not None and model.columns else ""
        sizes = f"width {spec.k}{more}"
    return f"{tokens}, {sizes}, {spec.dtype}"


def conditions(needs: Sequence[str]) -> str:
    """Conditions (``needs.py``) as one readable line."""
    return ", ".join(map(_condition, needs))


def needed(finding: Finding) -> str:
    """The conditions of the minimal case as one line, without the fields that a user's own model
    fixes."""
    given = {"model", *FIXED_BY_OWN} if title_of(finding.minimal.spec.model) else set()
    return conditions([need for need in finding.needs if need.partition("=")[0] not in given])


def needed_title(finding: Finding) -> str:
    """What ``needed`` lists: conditions without which the finding does not show, or some of which
    it may not need, as the search for a smaller case ended before it had tried all changes."""
    return "may be required to reproduce" if finding.untried else "required to reproduce"


def _condition(need: str) -> str:
    name, equals, value = need.partition("=")
    if name == "model" and equals:
        return f"the model {model_words(value)}"
    if value in ("True", "False"):
        return f"{'' if value == 'True' else 'no '}{name.replace('_', ' ')}"
    return f"{name.replace('_', ' ')}{' ' * bool(equals)}{value}"


def model_words(name: str) -> str:
    """A model's name, without the hash of its file if it is a user's, and its title if it is
    ours."""
    model = MODELS.get(name)
    title = f" ({model.title})" if model is not None and not model.own else ""
    return name.partition("#")[0] + title


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
    """The effect of a finding, which is how far the worst output or gradient is off, in words."""
    effect = float(finding.effect)
    if isinstance(finding.expect, Runs | Refuses):
        return "it fails with an error or ends the process, so no wrong number goes unnoticed"
    if finding.rule == "census":
        return _OF_CENSUS[weighed("silent", effect, "gaussian").severity]
    if isinstance(finding.expect, Present):
        return "a result that training needs is missing"
    if finding.came:
        return _CAME[finding.came]
    if effect == SMALL:
        return "how far outputs and gradients are off could not be measured"
    if math.isinf(effect):  # a finding of an older release, which did not record ``came``
        return "an output or a gradient is off by more than any finite number"
    off = f"{effect:.1%}" if effect < 10 else f"{effect:.3g} times"
    if finding.at.what == "function":
        return f"what this backward returns is off by {off} of its size"
    usual = "the recipe itself costs" if finding.scaled else "rounding costs"
    beyond = f"of its size, beyond what {usual}"
    if effect < 0.001:
        return f"no output or gradient is off by more than a thousandth {beyond}"
    return f"the worst output or gradient is off by {off} {beyond}"


def known_words(entry: str) -> str:
    """Words for a finding that this entry of the ledger explains."""
    return f"this is the known issue {entry}"


def report(finding: Finding, replay: str) -> str:
    """The text of a finding in the terminal: its sentence, severity, configuration, minimal case,
    conditions, and ``replay``, the command that runs it again."""
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
        lines.append(f"  {needed_title(finding)}: {needs}")
    if finding.needless:
        lines.append(f"  still fails without: {conditions(finding.needless)}")
    lines += [f"  {line}" for line in finding.first_bad]
    lines += [f"  does not happen with: {what}" for what in finding.avoided]
    if finding.flake != "always":
        lines.append(f"  reproduces {FLAKE_WORDS[finding.flake]}")
    lines += [f"  also seen, but not every time, as: {other}" for other in finding.seen_as]
    return "\n".join(
        [
            *lines,
            f"  found by: narrowfuzz rule {finding.rule}",
            f"  replay: {replay}",
            f"  id {finding.id}, fingerprint {finding.fingerprint}",
        ]
    )


#: How reliably a finding reproduces, in words.
FLAKE_WORDS: dict[Flake, str] = {
    "always": "every time",
    "per process": "once in each new process, not when it is repeated",
    "flaky": "sometimes",
}
