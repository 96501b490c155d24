"""``narrowfuzz bisect``: find the first release, or commit, of a package that shows a divergence,
and the last that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from packaging.version import InvalidVersion, Version

from narrowfuzz.bisect import releases
from narrowfuzz.bisect.commits import Checkout
from narrowfuzz.bisect.releases import ReleaseEnvironment, release_environment
from narrowfuzz.bisect.script import Script, script_of
from narrowfuzz.bisect.search import Change, Line, VersionAnswer, change, oldest
from narrowfuzz.report.lifetime import Database, Kind, record_releases
from narrowfuzz.report.terminal import console

#: Answer -> the event that is recorded for it; none is for a release that cannot tell.
_KINDS: dict[str, Kind] = {"shows": "seen", "gone": "gone"}


@dataclass(frozen=True)
class Question:
    """Options of the command line."""

    target: str
    package: str
    #: Versions or commits that are known to differ, in either order; "": to be found.
    good: str = ""
    bad: str = ""
    #: A checkout whose commits are tried instead of releases.
    repo: Path | None = None
    #: Further packages, as PACKAGE==VERSION, that every tried version runs with.
    others: tuple[str, ...] = ()
    #: How often the script runs before a version counts as not showing it; 0: as the finding needs.
    runs: int = 0
    #: File or URL of the database for the answers of releases; "": the default one, if the finding
    #: is in narrowfuzz's own folder of runs.
    database: str = ""


@dataclass(frozen=True)
class Found:
    """The result: the tried versions in their order with their answers, the changes between them,
    and sentences about these."""

    package: str
    title: str
    asked: tuple[VersionAnswer, ...]
    changes: tuple[Change, ...]
    sentences: tuple[str, ...]

    @property
    def code(self) -> int:
        """The exit code: 125 if no version can tell, else 0."""
        return 125 if all(one.answer == "cannot tell" for one in self.asked) else 0


def bisect(question: Question, say: Callable[[str], None] = lambda line: None) -> Found:
    """Try versions to find where the answer changes; ``say`` gets a line for each of them. Raises
    ValueError for invalid options."""
    script = script_of(question.target, question.runs)
    say(f"{script.title}")
    if question.repo is not None:
        return _of_commits(question, script, Checkout(question.repo, question.package), say)
    of = script.finding  # nothing is recorded for a known issue or a bare script
    database = Database.of(question.database, of.folder) if of is not None else None
    found = _of_releases(question, script, say)
    if database is not None and of is not None:
        answers = [(a.version, _KINDS[a.answer]) for a in found.asked if a.answer in _KINDS]
        record_releases(database, of, found.package, answers)
    return found


def _heard(
    package: str, say: Callable[[str], None], ask: Callable[[str], VersionAnswer]
) -> Callable[[str], VersionAnswer]:
    def heard(version: str) -> VersionAnswer:
        one = ask(version)
        words = {"shows": "shows it", "gone": "does not show it"}
        outcome = words.get(one.answer, f"cannot tell: {one.why}")
        say(f"{package} {version[:12]}: {outcome}")
        return one

    return heard


def _of_releases(question: Question, script: Script, say: Callable[[str], None]) -> Found:
    package = question.package
    versions = releases.releases(package)
    ends = [_known(package, text, versions) for text in (question.good, question.bad)]

    def ask(version: str) -> VersionAnswer:
        try:
            environment = release_environment(package, version, question.others)
        except ValueError as error:
            return VersionAnswer(version, "cannot tell", str(error))
        return script.ask(version, environment.changed_variables)

    line = Line(versions, _heard(package, say, ask))
    if all(ends):
        changes = [_between(line, *(versions.index(end) for end in ends))]
    else:
        changes = list(_around(line, ends[1] or releases.here(package)))
    sentences = list(_said(package, line, changes))
    for one in changes:
        if url := releases.compared(package, one.before.version, one.after.version):
            sentences.append(f"what changed: {url}")
    return _found(package, script, line, changes, sentences)


def _known(package: str, text: str, versions: list[str]) -> str:
    """The version that a user names, as the index spells it; "" for "". Raises ValueError if the
    index does not have it."""
    if not text:
        return ""
    try:
        same = [version for version in versions if Version(version) == Version(text)]
    except InvalidVersion:
        raise ValueError(f"{text!r} is no version") from None
    if not same:
        known = ", ".join(versions[-8:])
        raise ValueError(f"the index has no {package} {text}: it has {known}")
    return same[0]


def _between(line: Line, one: int, other: int) -> Change:
    """The change between two places. Raises ValueError if their answers do not differ, or if one
    cannot tell."""
    low, high = sorted((one, other))
    ends = line.at(low), line.at(high)
    for end in ends:
        if end.answer == "cannot tell":
            raise ValueError(f"{end.version} cannot tell: {end.why}")
    if ends[0].answer == ends[1].answer:
        does = "show it" if ends[0].answer == "shows" else "do not show it"
        raise ValueError(
            f"{ends[0].version} and {ends[1].version} both {does}: name two that differ"
        )
    return change(line, low, high)


def _around(line: Line, bad: str) -> Iterator[Change]:
    """The changes around the version ``bad``, which must show the divergence: where it appears, and
    where it is gone again. Raises ValueError if that version does not show it."""
    if bad not in line.versions:
        bad = line.versions[-1]
    shown, newest = line.versions.index(bad), len(line.versions) - 1
    if line.at(shown).answer != "shows":
        why = f": {line.at(shown).why}" if line.at(shown).why else ""
        raise ValueError(
            f"{bad} {'does not show it' if not why else 'cannot tell'}{why}; name a version that "
            "shows it with --bad"
        )
    without = oldest(line, shown)
    if without is not None:
        shows = min(place for place, one in line.answers.items() if one.answer == "shows")
        yield change(line, without, shows)
    if newest != shown and line.at(newest).answer == "gone":
        yield change(line, shown, newest)


def _said(package: str, line: Line, changes: list[Change]) -> Iterator[str]:
    for one in changes:
        before, after = one.before.version, one.after.version
        if one.appears:
            yield f"{package} {after} is the first that shows it, {before} the last that does not"
        else:
            yield f"{package} {after} no longer shows it, {before} is the last that does"
        if one.between:
            names = ", ".join(skipped.version for skipped in one.between)
            yield f"could not be tested in between: {names}"
    if not any(one.appears for one in changes):
        shows = [line.answers[place] for place in sorted(line.answers)]
        first = next((one.version for one in shows if one.answer == "shows"), "")
        if first:
            yield f"no older release without it was found; the oldest with it is {package} {first}"


def _of_commits(
    question: Question, script: Script, checkout: Checkout, say: Callable[[str], None]
) -> Found:
    if not question.good or not question.bad:
        raise ValueError("--repo needs --good and --bad: two commits of which one shows it")
    commits = checkout.between(question.good, question.bad)
    with checkout.tree() as tree:

        def ask(commit: str) -> VersionAnswer:
            try:
                folder = checkout.path_in(tree, commit)
            except ValueError as error:
                return VersionAnswer(commit, "cannot tell", str(error))
            # a file of two commits a second apart may have the size and time of a stale cache
            environment = ReleaseEnvironment((folder,), {"PYTHONDONTWRITEBYTECODE": "1"})
            return script.ask(commit, environment.changed_variables)

        line = Line(commits, _heard(question.package, say, ask))
        found = _between(line, 0, len(commits) - 1)
    subjects = {one.version: checkout.subject(one.version) for one in (found.before, found.after)}
    sentences = list(_of_commit(found, subjects))
    return _found(question.package, script, line, [found], sentences)


def _of_commit(found: Change, subjects: Mapping[str, str]) -> Iterator[str]:
    before, after = subjects[found.before.version], subjects[found.after.version]
    yield f"first commit that {'shows' if found.appears else 'no longer shows'} it: {after}"
    yield f"the one before it that can tell: {before}"
    if found.between:
        names = ", ".join(one.version[:12] for one in found.between)
        yield f"could not be tested in between: {names}"


def _found(
    package: str, script: Script, line: Line, changes: list[Change], sentences: list[str]
) -> Found:
    answers = tuple(line.answers[place] for place in sorted(line.answers))
    return Found(package, script.title, answers, tuple(changes), tuple(sentences))


def bisect_command(question: Question) -> Found:
    """As ``bisect``, printing the answer of each version."""
    page = console(markup=False)
    return bisect(question, partial(page.print, soft_wrap=True))


def print_found(found: Found) -> None:
    """Print the result for people."""
    page = console(markup=False)
    for sentence in found.sentences or ("no release can tell",):
        page.print(sentence, soft_wrap=True)
