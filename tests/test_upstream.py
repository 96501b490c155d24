"""``upstream/``: the issues that would be filed first, and fixes that are run before they are
believed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from narrowfuzz.ledger.ledger import Entry, load_entries, stands
from narrowfuzz.report.known_issue import TE, confirmed_on, issue_body, release_of_te
from narrowfuzz.triage.verify import CANNOT, GONE
from reproductions import ROOT, about_gcc, alone, compiles, miscompiles, shown
from te_on_cpu.environment import ensure

UPSTREAM = ROOT / "upstream"
ENTRIES = {entry.id: entry for entry in load_entries()}
FOLDERS = sorted(path.name for path in UPSTREAM.iterdir() if path.is_dir())


def folders() -> list[Any]:
    """One of the quick ones each time: nothing here touches them. One that compiles C++ is slow."""
    quick = next(name for name in FOLDERS if not compiles(ENTRIES[name]))
    heavy = pytest.mark.heavy
    return [pytest.param(n, id=n, marks=() if n == quick else heavy) for n in FOLDERS]


def needs(entry: Entry) -> None:
    """What a test needs to be about what the entry names."""
    if TE in entry.versions:
        ensure(release_of_te(entry))
    elif stands(entry) != "named":
        pytest.skip("it names other versions")


def without_versions(text: str) -> str:
    return text.split("### Versions")[0].strip()


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_the_text_is_what_the_command_prints(name: str) -> None:
    """After a change: narrowfuzz known NAME --issue > upstream/NAME/issue.md."""
    entry = ENTRIES[name]
    needs(entry)
    kept = (UPSTREAM / name / "issue.md").read_text()
    assert without_versions(kept) == without_versions(issue_body(entry))
    assert "### Versions" in kept


@pytest.mark.parametrize("name", FOLDERS)
def test_the_text_names_the_releases_that_its_entry_names(name: str) -> None:
    kept = (UPSTREAM / name / "issue.md").read_text()
    assert f"- confirmed on: {confirmed_on(ENTRIES[name])}\n" in f"{kept}\n"


def test_the_readme_names_each_of_them() -> None:
    told = set(re.findall(r"^\| \[([^\]]+)\]", (UPSTREAM / "README.md").read_text(), re.MULTILINE))
    assert told == set(FOLDERS)


def changed(patch: Path) -> list[str]:
    """The files that a patch changes."""
    return re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.MULTILINE)


def installed(entry: Entry, package: str) -> Path:
    """The folder that holds a package."""
    if package == TE:
        return ensure(release_of_te(entry))
    found = importlib.util.find_spec(package)
    assert found and found.origin
    return Path(found.origin).parents[1]


def patched(entry: Entry, patch: Path, overlay: Path) -> Path:
    """A folder with the package as the patch makes it: links to what is installed, and copies of
    the files that it changes."""
    files = changed(patch)
    for file in files:
        _copy(installed(entry, file.split("/")[0]), overlay, Path(file))
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(overlay.parent)}
    subprocess.run(
        ["git", "apply", "--whitespace=nowarn", str(patch)],
        cwd=overlay, env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for file in files:
        before = installed(entry, file.split("/")[0]) / file
        assert (overlay / file).read_text() != before.read_text(), f"{file} is as it was"
    return overlay


def _copy(installed: Path, overlay: Path, file: Path) -> None:
    """One file as a copy of its own, everything beside it and beside its folders as links."""
    at = Path()
    for part in file.parts:
        folder = overlay / at
        if folder.is_symlink():
            folder.unlink()
        if not folder.is_dir() or not at.parts:
            folder.mkdir(parents=True, exist_ok=True)
            for other in (installed / at).iterdir() if at.parts else ():
                if other.name != "__pycache__":
                    (folder / other.name).symlink_to(other)
        at /= part
    (overlay / file).unlink()
    (overlay / file).write_bytes((installed / file).read_bytes())


def test_what_a_patch_changes_is_a_copy_and_the_rest_a_link(tmp_path: Path) -> None:
    home, overlay = tmp_path / "home", tmp_path / "overlay"
    for file in ("lib/a.py", "lib/inner/b.py", "lib/inner/c.py", "lib/other/d.py"):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).write_text(file)
    for file in ("lib/inner/b.py", "lib/inner/c.py"):
        _copy(home, overlay, Path(file))
    for file in ("lib/a.py", "lib/inner/b.py", "lib/inner/c.py", "lib/other/d.py"):
        assert (overlay / file).read_text() == file
    (overlay / "lib/inner/b.py").write_text("changed")
    assert (home / "lib/inner/b.py").read_text() == "lib/inner/b.py"
    assert (overlay / "lib/other").is_symlink() and not (overlay / "lib/inner").is_symlink()


@pytest.mark.heavy
@pytest.mark.parametrize("name", folders())
def test_the_fix_cures_it(name: str, tmp_path: Path) -> None:
    """The issue's reproduction and the entry's own script, both over the patched package."""
    entry = ENTRIES[name]
    assert entry.issue
    needs(entry)
    if about_gcc(entry) and not miscompiles():
        pytest.skip("another compiler, or CPU, than those it is about")
    overlay = patched(entry, UPSTREAM / name / "fix.patch", tmp_path / "overlay")
    for number, script in enumerate((entry.reproduction, entry.path)):
        cache = tmp_path / f"cache{number}"
        cache.mkdir()
        result = alone(script, entry, cache, [overlay])
        # a script that asks which CPU the compiler tunes for cannot tell where it knows it
        fine = (GONE, CANNOT) if about_gcc(entry) and script == entry.path else (GONE,)
        assert result.code in fine and not shown(entry.issue, result.output), result.output
