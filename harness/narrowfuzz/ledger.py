"""The ledger: divergences of released libraries that are known, each with its script.

One TOML file per cause in ``reports/known/``. An entry explains findings by fingerprint or, better,
by an *as-built deviation* that the reference then follows, so that every other rule stays sharp on
the same case. It holds only for the versions it names.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from narrowfuzz.case import Spec
from narrowfuzz.content import content_dir
from narrowfuzz.numerics.reference import DEVIATIONS

#: Deviations the oracles follow beyond those of the quantiser's reference.
LAYER_DEVIATIONS = {
    "bias_ignored": "the layer returns its output without the bias",
    "bias_ignored_if_empty": "the same, but only where nothing is contracted (in_features = 0)",
    "rescale_overflow": "1/s_a * 1/s_b overflows before it rescales a gradient",
}

#: Deviations of the state machine that the rules of schedules follow.
STATE_DEVIATIONS = {
    "algorithm_of_last_region": "an update goes by the algorithm of the region entered last",
    "checkpointed_region_keeps": "a region opened in a reentrant checkpoint ends without an update",
    "disabled_region_keeps": "a region inside a disabled one ends without an update",
    "evaluation_stages": "a forward without a graph leaves its maxima for the next update",
    "first_layer_owns_update": "gradients update only if the first layer's backward runs",
    "idle_windows_roll": "an update shifts windows of what has not run, too",
    "inner_recompute_updates_forward": "a region inside a checkpoint updates again when recomputed",
    "inner_region_owns_update": "an inner region makes another forward update gradients",
    "margin_of_first_forward": "a layer keeps the margin it ran with first",
    "recompute_leaves_ownership": "a recompute lets the next layer of its region update gradients",
    "recompute_updates_forward": "each recompute updates the forward scales once more",
    "saved_after_fp8_only": "state is saved only if the last forward was in FP8",
    "segments_update_gradients": "each layer of a reentrant checkpoint updates all gradients",
    "window_resized_at_its_newest_end": "another history cuts or pads the newest maxima",
    "writing_parameters_updates_forward": "an optimizer step updates forward scales once more",
}


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One known divergence."""

    id: str
    title: str
    #: What happens and why, with the library's function.
    explanation: str
    severity: str
    link: str
    recipes: tuple[str, ...]
    #: Distribution -> version specifier.
    versions: dict[str, str]
    #: Date to look again.
    review: str
    #: Stand-alone script beside the entry: exits 1 while the divergence is there.
    script: str
    #: Globs; none and no deviation: confirmed by hand, and no case expresses it yet.
    fingerprints: tuple[str, ...] = ()
    backends: tuple[str, ...] = ("*",)
    deviation: str = ""
    #: Smallest case, as JSON.
    case: str = ""

    def holds_for(self, recipe: str, backend: str) -> bool:
        return any(fnmatch.fnmatch(recipe, g) for g in self.recipes) and any(
            fnmatch.fnmatch(backend, g) for g in self.backends
        )


class Ledger:
    """The entries that hold for the installed versions."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(entries)

    def deviations(self, spec: Spec) -> dict[str, str]:
        """As-built deviations to follow for this Spec: deviation -> entry id."""
        return {
            entry.deviation: entry.id
            for entry in self.entries
            if entry.deviation and entry.holds_for(spec.recipe, spec.backend)
        }

    def match(self, fingerprint: str, spec: Spec) -> str:
        """Id of the entry that explains a fingerprint, or ""."""
        for entry in self.entries:
            if entry.holds_for(spec.recipe, spec.backend) and any(
                fnmatch.fnmatchcase(fingerprint, glob) for glob in entry.fingerprints
            ):
                return entry.id
        return ""


def known_dir() -> Path:
    return content_dir("reports") / "known"


def load_ledger() -> Ledger:
    """All entries for the installed versions. Raises ValueError naming a file that is not valid."""
    return Ledger(entry for entry in load_entries() if _installed(entry))


def load_entries() -> list[Entry]:
    entries = []
    for path in sorted(known_dir().glob("*.toml")):
        try:
            entry = msgspec.toml.decode(path.read_bytes(), type=Entry)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(f"ledger entry {path.name}: {error}") from None
        if (
            entry.deviation
            and entry.deviation not in DEVIATIONS | LAYER_DEVIATIONS | STATE_DEVIATIONS
        ):
            raise ValueError(f"ledger entry {path.name}: no deviation {entry.deviation!r}")
        for wanted in entry.versions.values():
            try:
                SpecifierSet(wanted)
            except InvalidSpecifier:
                raise ValueError(f"ledger entry {path.name}: bad version {wanted!r}") from None
        entries.append(entry)
    return entries


def _installed(entry: Entry) -> bool:
    for package, wanted in entry.versions.items():
        try:
            version = importlib.metadata.version(package)
            if not SpecifierSet(wanted).contains(version.split("+")[0], prereleases=True):
                return False
        except importlib.metadata.PackageNotFoundError:
            return False
    return True
