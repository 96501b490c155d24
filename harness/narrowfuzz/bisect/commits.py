"""Commits of a checkout, tried in a separate work tree: the checkout is not changed."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

#: Folders below a checkout's root that may hold the package.
_ROOTS = ("", "src", "python")


@dataclass(frozen=True)
class Checkout:
    """A git repository, and the name of the package in it."""

    repository: Path
    package: str

    def __post_init__(self) -> None:
        if not self.repository.is_dir() or self._git("rev-parse", "--git-dir", check=False) == "":
            raise ValueError(f"--repo {self.repository} is no git repository")

    def _git(self, *args: str, check: bool = True) -> str:
        done = subprocess.run(
            ["git", "-C", str(self.repository), *args], capture_output=True, text=True, check=False
        )
        if check and done.returncode:
            last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            raise ValueError(f"git {args[0]} in {self.repository}: {last}")
        return done.stdout.strip() if not done.returncode else ""

    def commit(self, name: str) -> str:
        """The full hash of a commit. Raises ValueError if there is none of this name."""
        found = self._git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", check=False)
        if not found:
            raise ValueError(f"{self.repository} has no commit {name!r}")
        return found

    def between(self, one: str, other: str) -> list[str]:
        """The commits from the older of the two to the newer, along first parents. Raises
        ValueError if neither descends from the other."""
        one, other = self.commit(one), self.commit(other)
        for old, new in ((one, other), (other, one)):
            if self._git("merge-base", old, new, check=False) == old:
                later = self._git("rev-list", "--reverse", "--first-parent", f"{old}..{new}")
                return [old, *later.split()]
        raise ValueError(f"{one[:12]} and {other[:12]} are on different branches: name two of one")

    def subject(self, commit: str) -> str:
        """The short hash, the day and the first line of a commit."""
        return self._git("log", "-1", "--format=%h %cs %s", commit)

    @contextmanager
    def tree(self) -> Iterator[Path]:
        """A temporary work tree in which commits are checked out."""
        with tempfile.TemporaryDirectory(prefix="narrowfuzz-bisect-") as folder:
            tree = Path(folder) / "tree"
            self._git("worktree", "add", "--detach", "--force", str(tree), "HEAD")
            try:
                yield tree
            finally:
                self._git("worktree", "remove", "--force", str(tree))

    def path_in(self, tree: Path, commit: str) -> Path:
        """Check out the commit; the folder in it that holds the package. Raises ValueError if there
        is none."""
        Checkout(tree, self.package)._git("checkout", "--quiet", "--force", "--detach", commit)
        for root in _ROOTS:
            if (tree / root / self.package).is_dir():
                return tree / root
        raise ValueError(f"it has no folder {self.package}/")
