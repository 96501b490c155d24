"""Commands in this process, and processes of their own for what a test must not share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pytest
from narrowfuzz.cli import main
from narrowfuzz.machine.overlay import folder_of
from te_on_cpu.environment import DEFAULT, VERSION_VARIABLE, ensure

HERE = Path(__file__).parent


def python(
    *args: str | Path,
    code: int | None = 0,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | str | None = None,
    seconds: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with these arguments, on one thread. It must end with ``code``, with
    whatever code for None; ``env`` is set besides, a variable that is None is not."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    done = subprocess.run(
        [sys.executable, *map(str, args)],
        env={name: value for name, value in variables.items() if value is not None},
        cwd=cwd, timeout=seconds, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert code is None or done.returncode == code, done.stdout[-8000:] + done.stderr[-4000:]
    return done


def forked(
    library: Literal["transformer_engine", "triton"], release: str, *scripts: Path
) -> subprocess.CompletedProcess[str]:
    """Scripts one by one, each in a child of one process that has imported this release of the
    library; each one's exit code is printed behind what it printed itself."""
    if library == "transformer_engine":
        ensure(release)
        env = {VERSION_VARIABLE: release}
    else:
        env = {"PYTHONPATH": str(folder_of(f"{library}=={release}")), "TRITON_INTERPRET": "1"}
    return python(HERE / "run_forked.py", library, *scripts, env=env, code=None)


def codes(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The exit code of each script that ``forked`` ran, by its path."""
    return dict(line.rsplit(" ", 1) for line in done.stdout.splitlines() if line.startswith("/"))


def command(
    *argv: str | Path,
    code: int | None = 0,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | str | None = None,
    seconds: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """The command as a user types it, as ``python`` runs it."""
    return python("-m", "narrowfuzz", *argv, code=code, env=env, cwd=cwd, seconds=seconds)


def ends(*argv: str | Path) -> int:
    """The exit code of a command line in this process."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, argv)])
    return int(ended.value.code or 0)


def on_transformer_engine(file: str, *args: str | Path, version: str = DEFAULT) -> list[str]:
    """The lines that ``tests/file`` prints where TransformerEngine has this version; skips where
    that is not to be had."""
    try:
        ensure(version)
    except ValueError as why:
        pytest.skip(str(why))
    path = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH", ""))))
    return python(
        HERE / file, *args, env={VERSION_VARIABLE: version, "PYTHONPATH": path}
    ).stdout.splitlines()
