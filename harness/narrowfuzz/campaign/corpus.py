"""Cases that have shown something: a folder of case files that runs try first, with what is near
them, and add to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from narrowfuzz.arms.available import select_arms
from narrowfuzz.case.ladder import climb
from narrowfuzz.case.spec import Case, dump_case, load_case
from narrowfuzz.recipe.content import content_dir
from narrowfuzz.recipe.recipe import Recipe


@dataclass(frozen=True)
class Corpus:
    """The cases of a folder, by name of their file, and a sentence for each file that holds none
    that this version reads."""

    cases: tuple[Case, ...] = ()
    unread: tuple[str, ...] = ()


def shipped() -> Path:
    """The folder that every run tries, whatever else it is given."""
    return content_dir("reports") / "corpus"


def load(folder: Path) -> Corpus:
    """All case files of a folder. Raises ValueError if it is none."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--corpus {folder} is a file: name a folder of cases")
    cases, unread = [], []
    for file in sorted(folder.glob("*.json")):
        try:
            cases.append(load_case(file.read_bytes()))
        except (OSError, ValueError) as error:
            unread.append(f"{file}: {error}")
    return Corpus(tuple(cases), tuple(unread))


def keep(folder: Path, cases: Iterable[Case]) -> int:
    """Write these cases into a folder, each into a file that is named after it; returns how many it
    did not have. Raises ValueError if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new = {case.id: case for case in cases if not (folder / f"{case.id}.json").exists()}
        for name, case in new.items():
            (folder / f"{name}.json").write_bytes(dump_case(case) + b"\n")
    except OSError as error:
        raise ValueError(f"cannot write to --corpus {folder}: {error.strerror}") from None
    return len(new)


def playable(
    cases: Iterable[Case], recipes: Mapping[str, Recipe], arms: tuple[str, ...]
) -> tuple[Case, ...]:
    """Those that one of these recipes can play on one of the arms, each once."""
    able = select_arms(arms)
    return tuple(
        case
        for case in {case.id: case for case in cases}.values()
        if not case.history and _plays(case, recipes) and able & {a.name for a in climb(case.spec)}
    )


def _plays(case: Case, recipes: Mapping[str, Recipe]) -> bool:
    recipe = recipes.get(case.spec.recipe)
    if recipe is None:
        return False
    try:
        recipe.check(case.spec)
    except ValueError:
        return False  # of another release, or a backend that is not here
    return case.spec.backend in ("", *recipe.backends)
