"""The corpus: a folder of files of cases that have shown a divergence. Runs try them and their
neighbours, and add to them."""

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
    """The cases of a folder, in the order of their file names, and a sentence for each file that
    this version cannot read as a case."""

    cases: tuple[Case, ...] = ()
    unread: tuple[str, ...] = ()


def shipped() -> Path:
    """The folder of the corpus that is shipped with narrowfuzz."""
    return content_dir("reports") / "corpus"


def load(folder: Path) -> Corpus:
    """All cases of a folder. Raises ValueError if the path is a file."""
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
    """Write these cases into a folder, each into a file that is named after it; returns how many
    were new. Raises ValueError if the folder cannot be written to."""
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
    """The cases without history that one of these recipes can run on one of the arms, each once."""
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
        return False  # a case of another release, or of a backend that is not available here
    return case.spec.backend in ("", *recipe.backends)
