"""``--with PACKAGE==VERSION``: another release under this torch, in every process of a command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fresh import command
from narrowfuzz.campaign.compare import side_of
from narrowfuzz.machine import overlay
from narrowfuzz.recipe.recipe import lacks, load_recipes
from te_on_cpu import folders

RECIPES = load_recipes()


@pytest.fixture(autouse=True)
def _nothing_laid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NARROWFUZZ_CACHE", str(tmp_path))
    monkeypatch.delenv(overlay.RELEASES_VARIABLE, raising=False)


def package(cache: Path, version: str, source: str = "") -> Path:
    """What pip leaves of torchao ``version`` in its folder: a package and what is said of it."""
    folder = cache / f"torchao-{version}-{sys.implementation.cache_tag}"
    (folder / "torchao").mkdir(parents=True)
    (folder / "torchao" / "__init__.py").write_text(source)
    said = folder / f"torchao-{version}.dist-info"
    said.mkdir()
    (said / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torchao\nVersion: {version}\n")
    return folder


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("torchao", "--with 'torchao': write PACKAGE==VERSION, like torchao==0.15.0"),
        ("torchao>=0.15", "write PACKAGE==VERSION"),
        ("../torchao==1", "write PACKAGE==VERSION"),
        ("torch==2.12.0", "torch needs an environment of its own"),
        ("transformer_engine==1.10.0", "write --te-version 1.10.0"),
    ],
)
def test_what_is_no_release_of_a_library_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"^--with") as caught:
        overlay.restart_with_releases([text])
    assert says in str(caught.value)


def test_a_release_that_does_not_exist_is_refused_with_pips_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    ran = command("run", "--with", "torchao==0.99.0", code=2, seconds=120)
    assert "no matching distribution" in ran.stderr.lower(), ran.stderr
    assert ran.stderr.count("\n") == 1 and not [*tmp_path.iterdir()]


def test_a_release_that_does_not_import_is_refused(tmp_path: Path) -> None:
    package(tmp_path, "0.12.0", "raise ImportError('no such operator')")
    options = ("--with", "torchao==0.12.0")
    ran = command("replay", "no_such_case", *options, code=2, seconds=120)
    assert "torchao==0.12.0: it does not import here: ImportError: no such" in ran.stderr


@pytest.mark.heavy
def test_the_command_starts_again_over_the_release_and_says_what_it_cannot_play(
    tmp_path: Path,
) -> None:
    package(tmp_path, "0.8.0")
    options = ("--recipe", "torchao.*", "--with", "torchao==0.8.0")
    ran = command("run", *options, code=2, seconds=120)
    assert "needs torchao>=0.9, and 0.8.0 is installed" in ran.stderr
    assert ran.stderr.count("needs torchao>=0.18, and 0.8.0 is installed") == 1


def test_a_file_that_cannot_be_imported_on_this_torch_is_replaced(tmp_path: Path) -> None:
    file = "torchao/prototype/inductor/int8_sdpa_lowering.py"
    for version, kept in (("0.11.0", True), ("0.12.0", False)):
        folder = package(tmp_path, version)
        lowering = folder / file
        lowering.parent.mkdir(parents=True)
        lowering.write_text("import torch._inductor.kernel.flex_attention\n")
        overlay._complete(folder)
        assert ("flex_attention" in lowering.read_text()) is kept
    assert "def register_int8_sdpa():" in lowering.read_text()


def test_a_side_of_a_comparison_is_a_release_too(tmp_path: Path) -> None:
    folder = package(tmp_path, "0.15.0")
    assert side_of("torchao==0.15.0").overlay == str(folder)


def test_what_was_laid_is_part_of_the_command_and_of_scripts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(overlay.RELEASES_VARIABLE, "torchao==0.15.0")
    assert overlay.active_releases() == ("torchao==0.15.0",)
    overlay.restart_with_releases(["torchao==0.15.0"])  # done: it does not start again


def test_every_recipe_of_torchao_says_which_releases_it_knows() -> None:
    ours = [recipe for name, recipe in RECIPES.items() if name.startswith("torchao.")]
    assert ours and all(">=" in recipe.package and not lacks(recipe) for recipe in ours)


def test_pip_builds_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def run(command: list[str], **how: object) -> subprocess.CompletedProcess[str]:
        seen.append(command)
        return subprocess.CompletedProcess(command, 1, "one\nERROR: no wheel\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ValueError, match="could not install x==1: ERROR: no"):
        folders.installed(tmp_path / "x", ("x==1",))
    assert "--only-binary" in seen[0] and not [*tmp_path.iterdir()]
