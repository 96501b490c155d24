"""The ledger: known issues, which are confirmed divergences of released libraries with scripts.

Each entry is a TOML file in ``reports/known/``; entries that one patch would fix name the same
``cause``. An entry explains findings by fingerprint *and* a predicate on the case, the machine and
the verdict. Better, it names an *as-built deviation*, which the reference then imitates, so that
all other rules still detect other bugs on the same case. An entry holds for the versions that it
names; on others its script is run to find out whether the divergence still shows.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib.metadata
import importlib.util
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from narrowfuzz.case.spec import Case
from narrowfuzz.ledger.facts import Condition, Context, check_predicate, holds
from narrowfuzz.ledger.filed import Issue
from narrowfuzz.ledger.mitigations import CURES
from narrowfuzz.ledger.severity import DATA, Severity, Symptom, Use, Weighed, weighed
from narrowfuzz.machine.environment import checkout
from narrowfuzz.machine.machine import machine
from narrowfuzz.models.model import CALLS, PARTS
from narrowfuzz.numerics.reference import DEVIATIONS
from narrowfuzz.operators import DEVIATIONS as OPERATOR_DEVIATIONS
from narrowfuzz.recipe.content import content_dir
from narrowfuzz.recipe.deprecated import refused_field
from narrowfuzz.trace.verdict import Verdict

#: Deviations that the rules take into account, besides those of the quantiser's reference.
LAYER_DEVIATIONS = {
    "amax_before_rounding": "a scale is by the largest magnitude that a tensor had before it was"
    " rounded to its dtype",
    "autocast_ignored": "under autocast the layer returns the type of its input",
    "bias_ignored": "the layer returns its output without the bias",
    "bias_gradient_of_codes": "the bias' gradient is the sum of output gradients that were cast",
    "bias_ignored_if_empty": "the same, but only where nothing is contracted (in_features = 0)",
    "rescale_overflow": "1/s_a * 1/s_b overflows before it rescales a gradient",
    "shards_scaled_apart": "a weight that ranks share has a scale for each rank's piece",
}

#: Deviations of a library's scaling state that the rules of schedules imitate.
STATE_DEVIATIONS = {
    "algorithm_of_last_region": "an update goes by the algorithm of the region entered last",
    "checkpointed_region_keeps": "a region opened in a reentrant checkpoint ends without an update",
    "disabled_region_keeps": "a region inside a disabled one ends without an update",
    "evaluation_stages": "a forward without a graph leaves its maxima for the next update",
    "first_layer_owns_update": "gradients update only if the first layer's backward runs",
    "idle_windows_roll": "an update shifts windows of what has not run, too",
    "inner_recompute_updates_forward": "a region inside a checkpoint updates again when recomputed",
    "inner_region_owns_update": "an inner region makes another forward update gradients",
    "loaded_layers_wait": "an update leaves out layers that have not run since they were loaded",
    "margin_of_first_forward": "a layer keeps the margin it ran with first",
    "recompute_leaves_ownership": "a recompute lets the next layer of its region update gradients",
    "recompute_updates_forward": "each recompute updates the forward scales once more",
    "saved_after_fp8_only": "state is saved only if the last forward was in FP8",
    "segments_update_gradients": "each layer of a reentrant checkpoint updates all gradients",
    "window_resized_at_its_newest_end": "another history cuts or pads the newest maxima",
    "writing_parameters_updates_forward": "an optimizer step updates forward scales once more",
}

#: What the issue is from the point of view of the library's maintainers.
Kind = Literal["", "bug", "arguable", "expected", "artefact"]
KINDS: dict[Kind, str] = {
    "bug": "a bug that a maintainer would fix",
    "arguable": "a limitation, or arguable",
    "expected": "documented or expected behaviour",
    "artefact": "only on a CPU or in an emulation",
    "": "not said",
}


class Match(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A set of findings that an entry explains."""

    #: Globs of fingerprints.
    fingerprints: tuple[str, ...]
    #: Further conditions: necessary ones of the cause.
    when: dict[str, Condition] = {}
    #: As ``Entry.cure``, for these findings alone.
    cure: str = ""


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One known issue."""

    id: str
    #: Ids of entries that were merged into this one: ``narrowfuzz known`` still accepts them.
    formerly: tuple[str, ...] = ()
    title: str
    #: What happens and why, with the library's function.
    explanation: str
    #: What the library should do, in a sentence; what a user can do today.
    expected: str
    workaround: str
    #: Upstream threads about exactly this, and what was searched.
    links: tuple[str, ...]
    searched: str = ""
    #: These four determine the severity: see narrowfuzz/ledger/severity.py.
    symptom: Symptom
    effect: float
    data: str
    use: Use
    #: A quotation of the library's documentation of this use, or a statement that there is none.
    documentation: str
    #: The release or commit that fixes it, "" if none is known.
    cured: str = ""
    #: The hardware on which it was seen, and the devices, as torch calls them, for which the entry
    #: holds without running its script first.
    hardware: tuple[str, ...]
    devices: tuple[str, ...] = ("cpu",)
    recipes: tuple[str, ...]
    backends: tuple[str, ...] = ("*",)
    #: Distribution -> specifier of the versions for which the entry holds.
    versions: dict[str, str]
    #: Distribution -> specifier of versions in which the script did not show the divergence.
    absent_in: dict[str, str] = {}
    #: The date of the next review.
    review: str
    #: Stand-alone script beside the entry: exits with 1 while the divergence exists.
    script: str
    deviation: str = ""
    #: One of ``CURES``: the entry explains a finding only if the finding is gone under this cure;
    #: "" where the predicates suffice.
    cure: str = ""
    #: Operators (``operators/``), classes of modules, and ``CALLS`` and ``PARTS``, of which a model
    #: must have one to show it; (): any model may. For the list of what may affect a user.
    shown_by: tuple[str, ...] = ()
    #: Conditions for the deviation and for every match.
    when: dict[str, Condition] = {}
    #: Empty and no deviation: confirmed by hand, but no case can express it yet.
    matches: tuple[Match, ...] = ()
    #: What it is from the maintainers' point of view, and the text of an issue for them.
    kind: Kind = ""
    issue: Issue | None = None
    #: A name that is common to all entries that one patch would fix; "": no other entry has the
    #: same cause.
    cause: str = ""
    #: The folder of its file; set by the loader.
    folder: str = ""

    @property
    def path(self) -> Path:
        """The path of its script."""
        return Path(self.folder) / self.script

    @property
    def reproduction(self) -> Path:
        """The path of the short script that its issue shows."""
        return Path(self.folder) / f"{self.id}.issue.py"

    @property
    def one_cause(self) -> str:
        """The name of its cause: its own id where it shares none."""
        return self.cause or self.id

    @property
    def severity(self) -> Severity:
        return self.weighed.severity

    @property
    def weighed(self) -> Weighed:
        """Its severity, and why."""
        return weighed(self.symptom, self.effect, self.data, self.use, cured=self.cured_by)

    @property
    def cured_by(self) -> str:
        """The package and release, or the commit, that fixes it; "" if none does."""
        package = " or ".join(self.versions)
        return f"{package} {self.cured}" if self.cured[:1].isdigit() else self.cured

    @property
    def fingerprints(self) -> list[str]:
        """Globs of the fingerprints of all matches."""
        return [glob for match in self.matches for glob in match.fingerprints]

    def about(self, recipe: str) -> bool:
        """Does the entry concern this recipe?"""
        return any(fnmatch.fnmatch(recipe, glob) for glob in self.recipes)

    def fits(self, context: Context) -> bool:
        """True if the entry concerns the case's recipe and backend, and its conditions hold."""
        spec = context.case.spec
        return (
            self.about(spec.recipe)
            and any(fnmatch.fnmatch(spec.backend, glob) for glob in self.backends)
            and holds(self.when, context)
        )

    def fitting(self, fingerprint: str, context: Context) -> tuple[Match, ...]:
        """The matches by which a finding with this fingerprint is the divergence of this entry, if
        their cures help; () if it is not."""
        return tuple(
            match
            for match in (self.matches if self.fits(context) else ())
            if any(fnmatch.fnmatchcase(fingerprint, glob) for glob in match.fingerprints)
            and holds(match.when, context)
        )


#: How an entry applies here. "named": it names the installed versions and the device. "other": it
#: names other ones, so its script must be run. "absent": the package is not installed, or the
#: divergence is known not to show in its version.
Standing = Literal["named", "other", "absent"]


class Installed(NamedTuple):
    """A package that can be imported."""

    version: str
    #: False for a checkout, True for a package that was installed from its distribution.
    released: bool


class Ledger:
    """The entries that hold here: those that name the installed versions, and the others whose
    scripts still show the divergence, as ``shows`` reports."""

    def __init__(
        self,
        entries: Iterable[Entry],
        *,
        unnamed: Iterable[Entry] = (),
        shows: Callable[[Entry], bool] = lambda entry: False,
        device: str = "cpu",
    ) -> None:
        self.entries = tuple(entries)
        #: Entries that name other versions; ``shows`` is called once one would explain something.
        self.unnamed, self.shows, self.device = tuple(unnamed), shows, device

    def without_cures(self) -> Ledger:
        """The same without the entries that a cure decides about."""
        return self._only(lambda one: not (one.cure or any(match.cure for match in one.matches)))

    def without(self, id: str) -> Ledger:
        """The same without this entry."""
        return self._only(lambda one: one.id != id)

    def _only(self, keep: Callable[[Entry], bool]) -> Ledger:
        return Ledger(
            filter(keep, self.entries),
            unnamed=filter(keep, self.unnamed),
            shows=self.shows,
            device=self.device,
        )

    def deviations(self, case: Case) -> dict[str, str]:
        """The as-built deviations that hold for this case: deviation -> entry id."""
        context = self._context(case, None)
        return {
            entry.deviation: entry.id
            for entry in (*self.entries, *self.unnamed)
            if entry.deviation and entry.fits(context) and self._holds(entry)
        }

    def match(
        self, fingerprint: str, case: Case, verdict: Verdict, cured: Callable[[str], bool]
    ) -> str:
        """The id of the entry that explains a finding, or "". ``cured`` returns whether the finding
        is gone under a cure. Of a folder, entries whose conditions suffice come first: they name
        the error itself, where a cure, such as to leave a linear unconverted, may also remove
        others."""
        context = self._context(case, verdict)
        every = (*self.entries, *self.unnamed)
        folders = itertools.groupby(every, key=lambda entry: entry.folder)
        found = (self._match(list(some), fingerprint, context, cured) for _, some in folders)
        return next(filter(None, found), "")

    def _match(
        self,
        entries: Sequence[Entry],
        fingerprint: str,
        context: Context,
        cured: Callable[[str], bool],
    ) -> str:
        by_cure: list[tuple[Entry, tuple[str, ...]]] = []
        for entry in entries:
            for match in entry.fitting(fingerprint, context):
                cures = tuple(filter(None, (entry.cure, match.cure)))
                if cures:
                    by_cure.append((entry, cures))
                elif self._holds(entry):
                    return entry.id
        for entry, cures in by_cure:
            if self._holds(entry) and all(map(cured, cures)):
                return entry.id
        return ""

    def _context(self, case: Case, verdict: Verdict | None) -> Context:
        return Context(case, machine(), self.device, verdict)

    def _holds(self, entry: Entry) -> bool:
        return entry in self.entries or self.shows(entry)


def known_dir() -> Path:
    return content_dir("reports") / "known"


def load_ledger(
    shows: Callable[[Entry], bool] = lambda entry: False,
    device: str = "cpu",
    folders: Sequence[Path] = (),
) -> Ledger:
    """The ledger for the installed versions, including the entries in a user's ``folders``;
    ``shows`` decides about entries that name other versions.

    Raises ValueError naming a file that is not valid.
    """
    every = standing(device, folders)
    return Ledger(
        [entry for entry, how in every if how == "named"],
        unnamed=[entry for entry, how in every if how == "other"],
        shows=shows,
        device=device,
    )


def standing(device: str = "cpu", folders: Sequence[Path] = ()) -> list[tuple[Entry, Standing]]:
    """Every entry, and how it applies here."""
    installed = functools.cache(installed_package)  # all entries name the same few packages
    return [(entry, stands(entry, device, installed)) for entry in load_entries(folders)]


def load_entries(folders: Sequence[Path] = ()) -> list[Entry]:
    """Every entry, those in a user's ``folders`` first, as they may cover deliberate changes.

    Raises ValueError naming the file, and what is wrong in it, or a folder that has none.
    """
    found: list[Entry] = []
    for folder in (*folders, known_dir()):
        entries = [_load(p, p.stat().st_mtime_ns) for p in sorted(folder.glob("*.toml"))]
        if not entries and folder in folders:
            raise ValueError(f"--ledger {folder}: there is no entry, which is a TOML file, in it")
        found += entries
    merged = {old: entry.id for entry in found for old in entry.formerly}
    for entry in found:
        if entry.id in merged:
            raise ValueError(
                f"ledger entry {entry.id}: {merged[entry.id]} says that it was merged into that"
            )
    return found


@functools.cache
def _load(path: Path, changed: int) -> Entry:
    """The entry in a file. ``changed``, the time of the file's last change, is part of the cache's
    key only."""
    try:
        entry = msgspec.toml.decode(path.read_bytes(), type=Entry)
        _check(entry)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        field = re.search(r"unknown field `(\w+)`$", str(error))
        gone = refused_field("Entry", field.group(1)) if field else ""
        raise ValueError(f"ledger entry {path.name}: {gone or error}") from None
    return msgspec.structs.replace(entry, folder=str(path.parent))


def _check(entry: Entry) -> None:
    every = {*DEVIATIONS, *LAYER_DEVIATIONS, *STATE_DEVIATIONS, *OPERATOR_DEVIATIONS}
    if entry.deviation and entry.deviation not in every:
        raise ValueError(f"no deviation {entry.deviation!r}")
    for cure in filter(None, (entry.cure, *(match.cure for match in entry.matches))):
        if cure not in CURES:
            raise ValueError(f"no cure {cure!r}: there are {', '.join(CURES)}")
    named = CALLS | PARTS
    for name in entry.shown_by:
        if not (name in named or name.removeprefix("subclass of ").isidentifier()):
            raise ValueError(
                f"shown_by {name!r} is no operator, no class of modules, and none of "
                f"{', '.join(sorted(named))}"
            )
    if entry.data not in DATA:
        raise ValueError(f"data {entry.data!r} is none of {', '.join(DATA)}")
    if not (entry.links or entry.searched):
        raise ValueError("no links, and searched does not say where a thread was looked for")
    for name, predicate in [
        ("when", entry.when),
        *((f"matches[{i}].when", match.when) for i, match in enumerate(entry.matches)),
    ]:
        try:
            check_predicate(predicate)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    for wanted in (*entry.versions.values(), *entry.absent_in.values()):
        try:
            SpecifierSet(wanted)
        except InvalidSpecifier:
            raise ValueError(f"bad version {wanted!r}") from None


def stands(
    entry: Entry,
    device: str = "cpu",
    installed: Callable[[str], Installed | None] | None = None,
) -> Standing:
    """How an entry applies to the ``installed`` packages and the device of the run."""
    named = device in entry.devices
    for package, wanted in entry.versions.items():
        found = (installed or installed_package)(package)
        if found is None:
            return "absent"
        if not found.released:
            named = False
        elif package in entry.absent_in and _within(found.version, entry.absent_in[package]):
            return "absent"
        elif not _within(found.version, wanted):
            named = False
    return "named" if named else "other"


def installed_package(package: str) -> Installed | None:
    """The version of a package that can be imported; None if it cannot."""
    try:
        return Installed(importlib.metadata.version(package), not checkout(package))
    except importlib.metadata.PackageNotFoundError:
        return None if importlib.util.find_spec(package) is None else Installed("", False)


@functools.cache  # entries name few versions, and reading one takes long
def _within(version: str, wanted: str) -> bool:
    return SpecifierSet(wanted).contains(version.split("+")[0], prereleases=True)
