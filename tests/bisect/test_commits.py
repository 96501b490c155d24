"""Commits of a checkout: the one that shows something first is named, and the checkout is left as
it is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from narrowfuzz.bisect.command import Question, bisect
from narrowfuzz.bisect.commits import Checkout

SCRIPT = """
import sys
try:
    from thing import twice
except SyntaxError as error:
    print(f"cannot tell: {error}")
    sys.exit(125)
sys.exit(int(twice(3) != 6))
"""


def git(repo: Path, *args: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(
        ["git", "-C", str(repo), *who, *args], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Eight commits: the sixth is wrong, and the fourth does not import."""
    root = tmp_path / "repo"
    (root / "src" / "thing").mkdir(parents=True)
    git(tmp_path, "init", "--quiet", str(root))
    source = "def twice(x):\n    return {}\n"
    for number in range(8):
        body = "x +" if number == 3 else "x + x" if number < 5 else "x * 3"
        (root / "src" / "thing" / "__init__.py").write_text(source.format(body))
        (root / "number").write_text(str(number))
        git(root, "add", "-A")
        git(root, "commit", "--quiet", "-m", f"commit number {number}")
        git(root, "tag", f"n{number}")
    (root / "number").write_text("what somebody works on")
    (tmp_path / "script.py").write_text(SCRIPT)
    return root


def question(repo: Path, good: str = "n0", bad: str = "n7", **more: int) -> Question:
    script = str(repo.parent / "script.py")
    return Question(script, "thing", good, bad, repo, **more)  # type: ignore[arg-type]


def test_the_first_commit_that_shows_it_is_named(repo: Path) -> None:
    before = git(repo, "status", "--short"), git(repo, "rev-parse", "HEAD")
    said: list[str] = []
    found = bisect(question(repo), said.append)
    (change,) = found.changes
    assert change.after.version == git(repo, "rev-parse", "n5")
    assert change.before.version == git(repo, "rev-parse", "n4")
    assert "commit number 5" in found.sentences[0] and "commit number 4" in found.sentences[1]
    assert found.code == 0
    assert (git(repo, "status", "--short"), git(repo, "rev-parse", "HEAD")) == before
    assert len(git(repo, "worktree", "list").splitlines()) == 1
    assert not (repo / ".git" / "BISECT_START").exists()


def test_a_commit_that_cannot_tell_is_passed_over(repo: Path) -> None:
    found = bisect(question(repo, "n2", "n5"))
    assert found.changes[0].before.version == git(repo, "rev-parse", "n4")
    assert found.changes[0].after.version == git(repo, "rev-parse", "n5")


def test_what_was_mended_is_found_as_well(repo: Path) -> None:
    (repo / "src" / "thing" / "__init__.py").write_text("def twice(x):\n    return 2 * x\n")
    git(repo, "commit", "--quiet", "-am", "fixed")
    found = bisect(question(repo, "HEAD", "n6"))
    assert not found.changes[0].appears
    assert "no longer shows it" in found.sentences[0] and "fixed" in found.sentences[0]


def test_what_does_not_always_show_is_asked_again(repo: Path) -> None:
    count = repo.parent / "count"
    (repo.parent / "script.py").write_text(
        f"import pathlib, sys\ncount = pathlib.Path({str(count)!r})\n"
        "n = int(count.read_text()) if count.exists() else 0\ncount.write_text(str(n + 1))\n"
        "from thing import twice\nsys.exit(int(twice(3) != 6 and n % 3 == 2))\n"
    )
    found = bisect(question(repo, "n4", "n7", runs=3))
    assert found.changes[0].after.version == git(repo, "rev-parse", "n5")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("good", "bad", "why"),
    [
        ("n0", "n4", "both do not show it"),
        ("n5", "n7", "both show it"),
        ("n3", "n7", "cannot tell"),
        ("n0", "", "--repo needs --good and --bad"),
        ("n0", "nowhere", "has no commit 'nowhere'"),
    ],
)
def test_ends_that_do_not_do_are_refused(repo: Path, good: str, bad: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        bisect(question(repo, good, bad))
    assert len(git(repo, "worktree", "list").splitlines()) == 1


def test_other_branches_and_other_folders_are_refused(repo: Path, tmp_path: Path) -> None:
    git(repo, "checkout", "--quiet", "--force", "--orphan", "apart")
    git(repo, "commit", "--quiet", "-m", "apart")
    with pytest.raises(ValueError, match="different branches"):
        bisect(question(repo, "n0", "apart"))
    with pytest.raises(ValueError, match="no git repository"):
        Checkout(tmp_path, "thing")
