"""``narrowfuzz explain``: what a finding needs, what makes it go away, which known issue is like
it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from narrowfuzz.arms.available import select_arms
from narrowfuzz.arms.model_names import layer_names
from narrowfuzz.bisect.script import FLAKY_RUNS, Script
from narrowfuzz.case.ladder import BY_NAME as ARMS
from narrowfuzz.case.ladder import base_of
from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.explain.budget import budget, result_of
from narrowfuzz.explain.compiler import starts_in
from narrowfuzz.explain.cost import Prices
from narrowfuzz.explain.counting import DrawCounter, effect_of, role
from narrowfuzz.explain.switches import (
    Switch,
    akin_to,
    alternatives,
    compiled_otherwise,
    conditions,
    each_left_out,
    larger,
    other_data,
    together,
)
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import load_entries
from narrowfuzz.machine.device import check_device
from narrowfuzz.machine.environment import prepare
from narrowfuzz.models.catalog import LIBRARY, MODELS
from narrowfuzz.plants.registry import identity, planted
from narrowfuzz.recipe.recipe import UNCONVERTED, Recipe, load_every
from narrowfuzz.report.explanation import DRAWS, Answer, Count, Explained, Role, lines, save
from narrowfuzz.report.lookup import OnDisk, lookup
from narrowfuzz.report.nearest import nearest, resemblance
from narrowfuzz.report.replay import obstacles_to, register_own
from narrowfuzz.report.terminal import console
from narrowfuzz.trace.verdict import BAD, Verdict, fingerprint
from narrowfuzz.triage.finding import Finding
from narrowfuzz.triage.session import Session, SessionOptions, open_session

#: Time limit in seconds for all changes of a finding: of an eager one, and of a compiled one.
EAGER_SECONDS, COMPILED_SECONDS = 60.0, 300.0


@dataclass(frozen=True)
class Question:
    """Options of the command line."""

    #: A finding's id or folder.
    target: str
    #: Files of recipes, and a user's own models, that the finding is about.
    files: tuple[Path, ...] = ()
    models: tuple[str, ...] = ()
    te_version: str = ""
    #: Fault to plant meanwhile: ID or FILE:ID.
    plant: str = ""
    #: Time limit; 0: the default of such a finding.
    seconds: float = 0.0

    @property
    def planted(self) -> tuple[str, str] | None:
        """The file, "" for a shipped plant, and the id; None where nothing is planted."""
        file, _, id = self.plant.rpartition(":")
        return (file, id) if id else None


def explain(question: Question) -> Explained:
    """Find out what the finding needs, and save that in its folder. Raises ValueError if the target
    is no finding, or does not show here."""
    found = lookup(question.target)
    if not isinstance(found, OnDisk):
        raise ValueError(f"{question.target} is a case: name a finding's folder or id")
    plant = question.planted or ("", "")
    prepare(identity(*plant) if question.planted else "")
    if question.te_version:
        from te_on_cpu import environment as te

        te.choose(question.te_version)
    with planted(*plant):
        explained = _explained(question, found)
    save(found.folder, explained)
    return explained


def _explained(question: Question, found: OnDisk) -> Explained:
    start, finding = time.monotonic(), found.finding
    session = _session_of(finding, question)
    verdict = _seen(session.judge, finding)
    if verdict is None:
        raise ValueError(
            f"{finding.id} does not show here: narrowfuzz replay {found.folder} says more"
        )
    eager = finding.minimal.spec.compile == "none"
    seconds = question.seconds or (EAGER_SECONDS if eager else COMPILED_SECONDS)
    recipe, able = session.judge.recipe(finding.minimal.spec), session.runnable_recipes()
    left_out = _each_left_out(recipe, finding.minimal.spec, verdict)
    filtered = {other.name: other for other in left_out.values()}
    judge = replace(session.judge, recipes={**session.judge.recipes, **filtered})
    informed = judge.with_ledger(session.ledger.without(finding.known_issue or ""))
    counter = DrawCounter(judge, informed, verdict, start + seconds)
    words, case, own = _base(counter, finding, recipe, seconds)
    # the verdict is about a result of the smallest case: another model has others
    same = case.spec.model == finding.minimal.spec.model
    example = counter.example(case) if same else None
    arm = counter.rung(case.spec)
    parts = budget(judge, example, verdict, arm) if example is not None else None
    result = parts.result if parts is not None else result_of(verdict)
    prices = Prices(judge, case, arm, result) if same else None
    # what is compiled has few cures, and each is compiled again: they come before what takes longer
    cures, first = _answers(counter, own, compiled_otherwise(case, recipe), prices)
    compiler, skipped = _compiler(counter, finding, found.folder, question.planted)
    several = list(conditions(case, recipe))
    needs, later = _answers(counter, own, several)
    any_of = _any_of(counter, own, case, recipe, several, needs)
    # the recipe with the backends that run here, if it is among them
    others = alternatives(case, able.get(recipe.name, recipe), able, left_out)
    switches, last = _answers(counter, own, others, prices)
    variables, rest = _variables(counter, case, found.folder, finding.device, question.planted)
    by_data = _by_data(counter, case)
    return Explained(
        id=finding.id,
        sentence=finding.sentence,
        asked_of=words,
        shows=own,
        needs=tuple(needs),
        needs_one_of=any_of,
        switches=(*cures, *switches, *variables),
        first_bad=tuple(finding.first_bad),
        nearest=finding.known_issue or resemblance(nearest(finding, load_entries())),
        untried=(*first, *skipped, *later, *last, *rest),
        compiler=compiler,
        budget=parts,
        by_data=by_data,
    )


def _seen(judge: Judge, finding: Finding) -> Verdict | None:
    """The bad verdict with the finding's fingerprint that its case shows now, even as a consequence
    of another; a finding that does not always show is tried several times. None if it does not
    show."""
    spec = finding.minimal.spec
    family = judge.family(spec)
    # arms that are no part of the finding take as long to compile
    arms = frozenset({base_of(spec).name, finding.arm})
    for _ in range(1 if finding.flake == "always" else FLAKY_RUNS):
        for verdict in judge.judge(finding.minimal, None, arms).verdicts:
            if verdict.status in BAD and fingerprint(verdict, family) == finding.fingerprint:
                return verdict
    return None


def _session_of(finding: Finding, question: Question) -> Session:
    """A session that runs the finding's case, with the recipes of its package beside its own.
    Raises ValueError where it cannot run here."""
    check_device(finding.device)
    case = finding.minimal
    akin = akin_to(case.spec.recipe, load_every(question.files))
    session = open_session(
        SessionOptions(
            device=finding.device,
            recipes=akin | case.recipes,
            recipe_files=question.files,
            ledger="none",
        )
    )
    register_own(case, question.models)
    if case.spec.model not in {*MODELS, *LIBRARY}:
        raise ValueError("it is about a model of your own: name it with --model")
    if lacking := obstacles_to(session.judge, case, select_arms(())):
        raise ValueError(f"it cannot run here: {lacking[0]}")
    return session


def _each_left_out(recipe: Recipe, spec: Spec, verdict: Verdict) -> dict[str, Recipe]:
    """``each_left_out`` of the layers that the recipe converts. That of the verdict is not among
    them: unless it is converted, the verdict's rule says nothing of it."""
    if spec.model not in MODELS or recipe.name in UNCONVERTED:
        return {}
    names = layer_names(spec)
    wanted = names if len(names) > 1 else ()
    others = (name.removeprefix("model.") for name in wanted if name != verdict.at.layer)
    return each_left_out(recipe, tuple(others))


def _base(
    counter: DrawCounter, finding: Finding, recipe: Recipe, seconds: float
) -> tuple[str, Case, Count]:
    """The unchanged case, in words and itself, and its count: the first of the smallest, a larger
    and the generated case that shows the divergence on at least half of its draws, or else the one
    that shows it most often. A single element seldom has the value that the divergence needs.
    Raises ValueError if there is no time for a single case."""
    best: tuple[str, Case, Count] | None = None
    smallest = finding.minimal
    others = (("the case as it was generated", finding.case),)
    for words, case in (("the smallest case", smallest), *larger(smallest, recipe), *others):
        if best is not None and counter.late_for(case):
            break
        count = counter.count(case)
        if count is not None and (best is None or count.shown > best[2].shown):
            best = words, case, count
        if best is not None and 2 * best[2].shown >= best[2].of:
            break
    if best is None:
        raise ValueError(f"{DRAWS} seeds of a case take longer than {seconds:g} s: give --seconds")
    return best


def _any_of(
    counter: DrawCounter,
    own: Count,
    case: Case,
    recipe: Recipe,
    switches: Sequence[Switch],
    answers: Sequence[Answer],
) -> tuple[str, ...]:
    """The conditions that the divergence does not need one by one, if it is gone without all of
    them. All were asked on the case's own data."""
    words = tuple(a.words for a in answers if a.role == "not needed" and not a.data)
    mine = [switch for switch in switches if switch.words in words]
    without = together(case, recipe, mine) if len(mine) > 1 else None
    if without is None or counter.late_for(without):
        return ()
    count = counter.count(without)
    return words if count is not None and role(own, count) == "needed" else ()


#: The share of the remaining time that CompilerBisector may take.
_OF_COMPILER = 0.4


def _compiler(
    counter: DrawCounter, finding: Finding, folder: Path | None, plant: tuple[str, str] | None
) -> tuple[str, list[str]]:
    """A sentence on where inside the compiler the divergence starts, found with the finding's
    script in a process of its own, and what there was no time for. Nothing for findings that
    Inductor does not compile, that are on ranks, or that do not always show."""
    script, arm = folder and folder / "repro.py", ARMS[finding.arm]
    if script is None or arm.compiler != "inductor" or arm.sharded or finding.flake != "always":
        return "", []
    if not script.read_text().strip():
        return "", []
    seconds = _OF_COMPILER * (counter.deadline - time.monotonic())
    if seconds <= 0:
        return "", ["CompilerBisector"]
    found, done = starts_in(script.resolve(), finding.device, plant, seconds)
    more = "the rest of CompilerBisector's search" if found else "CompilerBisector"
    return found, [] if done else [more]


#: Environment variables that restrict the instructions that kernels use.
_OF_CPUS = ("ONEDNN_MAX_CPU_ISA=AVX2", "ATEN_CPU_CAPABILITY=avx2", "ATEN_CPU_CAPABILITY=default")


def _variables(
    counter: DrawCounter,
    case: Case,
    folder: Path | None,
    device: str,
    plant: tuple[str, str] | None,
) -> tuple[list[Answer], list[str]]:
    """The answers of the finding's script in processes with other environment variables, once each,
    and the variables that there was no time for; nothing if the script does not show the divergence
    unchanged, or does not run on the CPU."""
    script = folder and folder / "repro.py"
    found: list[Answer] = []
    untried: list[str] = []
    if script is None or device != "cpu" or not script.read_text().strip():
        return [], []
    if counter.late_for(case):  # the script compiles what the case compiles
        return [], [*_OF_CPUS]
    asks, started = Script(script.resolve(), "", plant=plant).ask, time.monotonic()
    if asks("as it is", {}).answer != "shows":
        return [], []
    each = time.monotonic() - started
    for setting in _OF_CPUS:
        if time.monotonic() + each > counter.deadline:
            untried.append(setting)
            continue
        name, _, value = setting.partition("=")
        answer = asks(setting, {name: value}).answer
        count = Count(int(answer == "shows"), int(answer != "cannot tell"), 1)
        roles: dict[str, Role] = {"shows": "not needed", "gone": "needed"}
        found.append(Answer(setting, count, roles.get(answer, "cannot say")))
    return found, untried


def _by_data(counter: DrawCounter, case: Case) -> dict[str, Count]:
    """How often the case shows the divergence with other data, as far as there is time."""
    if counter.late_for(case):  # its program may have to be compiled again
        return {}
    counts = {words: counter.count(other) for words, other in other_data(case).items()}
    return {words: count for words, count in counts.items() if count is not None}


def _answers(
    counter: DrawCounter, own: Count, switches: Iterable[Switch], prices: Prices | None = None
) -> tuple[list[Answer], list[str]]:
    """The answers, and the switches that there was no time for."""
    found, untried = [], []
    for switch in switches:
        if counter.late_for(switch.case):
            untried.append(switch.words)
        elif answer := effect_of(counter, own, switch):
            if prices is not None and answer.role == "needed" and not counter.late:
                arm = counter.rung(switch.case.spec, switch.arm)
                answer = replace(answer, cost=prices.of(switch.case, arm))
            found.append(answer)
        elif counter.late:
            untried.append(switch.words)
    return found, untried


def print_explained(explained: Explained) -> None:
    page = console(markup=False)
    for line in lines(explained):
        page.print(line, soft_wrap=True)
