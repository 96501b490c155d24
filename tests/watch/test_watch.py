"""``narrowfuzz watch``: a command passes through unchanged, and one thread's first bad value is
named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from narrowfuzz.trace.address import At
from narrowfuzz_watch import command
from narrowfuzz_watch.command import WatchOptions, _rerun, watch_command
from narrowfuzz_watch.records import FirstBad, Report
from narrowfuzz_watch.removals import UNCHANGED

WATCH = [sys.executable, "-m", "narrowfuzz", "watch"]


def watch(
    folder: Path, *command: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*WATCH, "--out", str(folder), *options, "--", *command], capture_output=True, check=False
    )


def document(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "first_bad.json").read_text())
    return found


def test_bytes_and_an_exit_code_pass(tmp_path: Path) -> None:
    done = watch(tmp_path / "run", "sh", "-c", r"printf '\377\000\n\r'; printf '\376' >&2; exit 7")
    assert (done.returncode, done.stdout) == (7, b"\377\000\n\r")
    assert done.stderr.startswith(b"\376narrowfuzz watch: no training was seen")
    told = document(tmp_path / "run")
    assert (told["trained"], told["first"], told["exit_code"]) == (False, None, 7)


def test_a_death_by_signal_passes(tmp_path: Path) -> None:
    done = watch(tmp_path / "run", "sh", "-c", "kill -TERM $$")
    assert done.returncode == -signal.SIGTERM
    assert document(tmp_path / "run")["exit_code"] == -signal.SIGTERM


def test_an_interrupt_reaches_the_command(tmp_path: Path) -> None:
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *a: sys.exit(5))\n"
        "print('ready', flush=True)\ntime.sleep(60)\n"
    )
    command = [*WATCH, "--out", str(tmp_path / "run"), "--", sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        assert running.stdout is not None and running.stdout.readline() == b"ready\n"
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=20) == 5


def test_a_sitecustomize_that_is_there_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.own = 3\n")
    paths = (str(tmp_path), os.environ.get("PYTHONPATH", ""))
    done = subprocess.run(
        [*WATCH, "--out", str(tmp_path / "run"), "--", sys.executable, "-c",
         "import sys; print(sys.own)"],
        capture_output=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.stdout == b"3\n"


@pytest.mark.parametrize(
    ("options", "command", "sentence"),
    [
        ((), ("no-such-command",), "is no command that can be run"),
        (("--against", "/nowhere"), ("true",), "is no run of narrowfuzz watch"),
        (("--repeat", "-1"), ("true",), "must not be negative"),
        (("--variant", "'"), ("true",), "cannot be split"),
        (("--variant", ""), ("true",), "is empty"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(
    tmp_path: Path, options: tuple[str, ...], command: tuple[str, ...], sentence: str
) -> None:
    against = Path(options[1]) if "--against" in options else None
    repeat = int(options[1]) if "--repeat" in options else 0
    variants = options[1:] if "--variant" in options else ()
    given = WatchOptions(
        command, against=against, repeat=repeat, variants=variants, out=tmp_path / "run"
    )
    with pytest.raises(ValueError, match=sentence):
        watch_command(given)


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    assert watch(tmp_path, "true").returncode == 0
    with pytest.raises(ValueError, match="holds an earlier run"):
        watch_command(WatchOptions(("true",), out=tmp_path))


TRAINING = """
import os, sys, torch
torch.set_num_threads(1)  # it forks
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(3):
    x = torch.randn(4, 8)
    if "data" in sys.argv and step == 1:
        x = torch.tensor([[float("nan")] * 8] * 4)
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
if "fork" in sys.argv:
    if (child := os.fork()) == 0:
        torch.log(-model(torch.randn(4, 8)).abs() - 1).sum().backward()
        os._exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.heavy
def test_a_training_under_watch_prints_what_it_prints_without(tmp_path: Path) -> None:
    plain = subprocess.run([sys.executable, "-c", TRAINING], capture_output=True, check=True)
    done = watch(tmp_path / "run", sys.executable, "-c", TRAINING, options=("--fail",))
    assert (done.returncode, done.stdout) == (0, plain.stdout)
    told = document(tmp_path / "run")
    assert (told["trained"], told["steps"], told["first"]) == (True, 3, None)


@pytest.mark.heavy
def test_fail_and_repeat_of_bad_data(tmp_path: Path) -> None:
    done = watch(
        tmp_path / "run", sys.executable, "-c", TRAINING, "data",
        options=("--fail", "--repeat", "1"),
    )  # fmt: skip
    assert done.returncode == 1
    told = document(tmp_path / "run")
    first = told["first"]
    assert first["at"] == {
        "event": 2, "layer": "0", "phase": "forward", "name": "aten.addmm", "index": [0, 0],
    }  # fmt: skip
    assert (first["cause"], first["made"]) == ("data", "given")
    assert first["because"].endswith("run once more, it came at the same place again")


#: Parameters are huge from step 2 on, an infinity follows from them, and NaN later from that.
GROWS = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e20)
def criterion(y):
    return y.pow(2).mean()
for step in range(5):
    loss = criterion(model(torch.ones(2, 4)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step + 1, loss.item())
"""


@pytest.mark.heavy
def test_it_says_when_the_loss_became_nan_too(tmp_path: Path) -> None:
    """The first bad value is one that nobody sees: an infinity, two steps before the NaN."""
    done = watch(tmp_path / "run", sys.executable, "-c", GROWS)
    told = document(tmp_path / "run")
    losses = dict(line.split() for line in done.stdout.decode().splitlines())
    step = min(int(step) for step, loss in losses.items() if loss == "nan")
    assert told["first"]["bad"] == "inf" and told["first"]["at"]["event"] < step
    assert told["loss_nan"] == step
    assert told["first"]["at"]["event"] <= told["first_nan"]["event"] <= step
    assert f"in step {step}".encode() in done.stderr


@pytest.mark.heavy
def test_who_asks_for_torch_and_imports_it_later_is_watched(tmp_path: Path) -> None:
    """transformers does, before it imports torch."""
    asks = "import importlib.util; assert importlib.util.find_spec('torch')\n" + GROWS
    watch(tmp_path / "run", sys.executable, "-c", asks)
    assert document(tmp_path / "run")["first"]["bad"] == "inf"


@pytest.mark.heavy
def test_a_training_without_nan_has_none(tmp_path: Path) -> None:
    watch(tmp_path / "run", sys.executable, "-c", TRAINING)
    told = document(tmp_path / "run")
    assert told["first_nan"] is None and told["loss_nan"] is None


#: log(0) in a function of no module: what matters are the zeros, and the line.
LOG = """
import torch

def entropy(p):
    return -(p * torch.log(p)).sum()  # line 5

model = torch.nn.Linear(4, 8)
p = torch.softmax(model(torch.ones(4, 4)), -1) * (torch.arange(8) > 2)
entropy(p).backward()
"""


@pytest.mark.heavy
def test_an_operator_outside_of_modules_has_the_line_that_called_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOG)
    done = subprocess.run(
        [*WATCH, "--out", "run", "--", sys.executable, "train.py"],
        capture_output=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    first = document(tmp_path / "run")["first"]
    assert (first["at"]["name"], first["lines"]) == ("aten.log", ["train.py:5 in entropy"])
    (operand,) = first["operands"]
    assert (operand["least"], operand["zeros"], operand["count"]) == (0.0, 12, 32)
    assert 0 < operand["most"] < 1 and operand["largest"] == operand["most"]
    assert b"12 of 32 are zero" in done.stderr and b"train.py:5 in entropy" in done.stderr


def test_an_operator_in_a_package_has_the_programs_own_line_besides(tmp_path: Path) -> None:
    """A package is what lies where Python installs them, here by a path that says so."""
    (tmp_path / "train.py").write_text(
        "import sysconfig, torch\n"
        "file = sysconfig.get_paths()['purelib'] + '/somebodys/loss.py'\n"
        "exec(compile('def entropy(p):\\n  return torch.log(p)', file, 'exec'))\n"
        "model = torch.nn.Linear(4, 8)\n"
        "entropy(-model(torch.ones(4, 4)).abs() - 1).sum().backward()\n"
    )
    subprocess.run(
        [*WATCH, "--out", "run", "--", sys.executable, "train.py"],
        capture_output=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    inner, outer = document(tmp_path / "run")["first"]["lines"]
    assert inner.endswith("somebodys/loss.py:2 in entropy") and outer == "train.py:5 in <module>"


def test_the_same_place_on_another_rank_is_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks make it at once, and another one is the first to tell each time: no hardware
    fault goes from one rank to another at the same operator of the same step."""

    def report(rank: int, name: str = "aten.log") -> Report:
        at = At(rank=rank, event=4, phase="forward", layer="head", name=name, index=(rank, 0))
        first = FirstBad(at=at, bad="nan", made="made", because="nobody knows")
        return Report(first=first, counts=True, trained=True, steps=9, exit_code=0)

    def repeated(*others: Report) -> FirstBad:
        left = iter(others)
        monkeypatch.setattr(command, "_run", lambda *a, **k: 0)
        monkeypatch.setattr(command, "reported", lambda *a, **k: next(left))
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        found = command._repeated(WatchOptions(("x",), repeat=len(others)), folder, report(1)).first
        assert found is not None
        return found

    assert repeated(report(0), report(1)).cause == "software or data"
    assert repeated(report(0), report(1, "aten.exp")).cause == "hardware or race"
    rerun = _rerun(UNCHANGED, report(0), repeated(report(1)))
    assert (rerun.came, rerun.detail) == ("still there", "at the same place")
    elsewhere = _rerun(UNCHANGED, report(0, "aten.exp"), repeated(report(1)))
    assert "step 4" in elsewhere.detail and "event" not in elsewhere.detail


@pytest.mark.heavy
def test_a_fork_has_records_of_its_own(tmp_path: Path) -> None:
    done = watch(tmp_path / "run", sys.executable, "-c", TRAINING, "fork")
    assert done.stdout.endswith(b"\n3\n")
    first = document(tmp_path / "run")["first"]
    assert (first["at"]["name"], first["bad"]) == ("aten.log", "nan")
    assert len(list((tmp_path / "run" / "ranks").glob("*.jsonl"))) == 2


#: Its value is bad where the forward runs a second time, where it is compiled, or always.
REMOVED = """
import os, sys, torch
from torch.utils.checkpoint import checkpoint
model, calls = torch.nn.Linear(8, 8), []
@torch.compile(backend="eager")
def is_compiled():
    return torch.ones(1) * torch.compiler.is_compiling()
def forward(x):
    calls.append(0)
    bad = {
        "recomputed": len(calls) % 2 == 0,
        "compiled": bool(is_compiled()),
        "always": True,
    }[sys.argv[1]]
    return torch.log(model(x) * 0 + (-1.0 if bad and "--mild" not in sys.argv else 1.0)).pow(2)
for step in range(1):
    checkpoint(forward, torch.randn(4, 8), use_reentrant=False).sum().backward()
    calls.clear()
if os.environ.get("BREAKS"):
    sys.exit(3)
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("when", "gone"),
    [
        ("recomputed", ["without activation checkpointing", "with --mild"]),
        ("compiled", ["without torch.compile", "with --mild"]),
        ("always", ["with --mild"]),
    ],
)
def test_what_is_removed_makes_it_go_away_or_not(
    tmp_path: Path, when: str, gone: list[str]
) -> None:
    variants = ("--variant", "--mild", "--variant", "BREAKS=1")
    done = watch(
        tmp_path / "run", sys.executable, "-c", REMOVED, when, options=("--remove", *variants)
    )
    assert done.returncode == 0, done.stderr
    reruns = document(tmp_path / "run")["reruns"]
    came = {rerun["change"]: rerun["came"] for rerun in reruns}
    assert [change for change, what in came.items() if what == "gone"] == gone
    assert {what for change, what in came.items() if change not in gone} == {"still there"}
    assert len(came) == 1 + 4 + 2 and reruns[0] == {
        "change": "unchanged", "came": "still there", "detail": "at the same place",
        "told": "at the same place",
    }  # fmt: skip


def test_a_run_that_ended_too_early_shows_nothing() -> None:
    at = At(event=3, name="aten.log")
    first = FirstBad(at=at, bad="nan", made="made")
    for report, came in (
        (Report(trained=True, steps=1, exit_code=1), "unknown"),
        (Report(trained=True, steps=3, exit_code=1), "gone"),
        (Report(trained=False, exit_code=0), "unknown"),
        (Report(trained=True, steps=9, exit_code=0), "gone"),
        (Report(trained=True, steps=2, exit_code=1, first=first, counts=True), "still there"),
    ):
        assert _rerun(UNCHANGED, report, first).came == came


#: In the run of the number that it is told, a low bit of one result flips: it makes no bad value.
FLIPPED = """
import sys, torch
from pathlib import Path
runs, flips = Path(sys.argv[1]), int(sys.argv[2])
number = int(runs.read_text()) + 1 if runs.exists() else 1
runs.write_text(str(number))
calls = []
@torch.library.custom_op("sick::copy", mutates_args=())
def copy(x: torch.Tensor) -> torch.Tensor:
    calls.append(out := x.clone())
    if len(calls) == 2 and number == flips:
        out.view(torch.int32).view(-1)[5] ^= 1
    return out
torch.manual_seed(0)
if number == 3 and flips == -1:
    sys.exit(5)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(3):
    model(copy(torch.randn(4, 8))).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if number == 2 and flips == -1:
        break
"""


@pytest.mark.heavy
def test_a_run_that_ended_elsewhere_is_not_compared(tmp_path: Path) -> None:
    done = watch(
        tmp_path / "run", sys.executable, "-c", FLIPPED, str(tmp_path / "runs"), "-1",
        options=("--full", "--repeat", "2", "--fail"),
    )  # fmt: skip
    told = document(tmp_path / "run")
    assert done.returncode == 0 and told["divergence"] is None
    assert told["notes"] == [
        "run 2 ran other operators: it is not compared",
        "run 3 ended with exit code 5: it is not compared",
    ]


@pytest.mark.heavy
@pytest.mark.parametrize(("flips", "others"), [(1, 2), (3, 2), (9, 0)])
def test_a_run_that_makes_other_numbers_alone_is_named(
    tmp_path: Path, flips: int, others: int
) -> None:
    done = watch(
        tmp_path / "run", sys.executable, "-c", FLIPPED, str(tmp_path / "runs"), str(flips),
        options=("--full", "--repeat", "2", "--fail"),
    )  # fmt: skip
    told = document(tmp_path / "run")
    assert done.returncode == bool(others), done.stderr
    if not others:
        assert "made the same numbers, bit for bit" in told["notes"][-1]
        return
    divergence = told["divergence"]
    assert (divergence["at"]["name"], divergence["at"]["event"]) == ("sick.copy", 2)
    assert divergence["cause"] == "hardware or race"
    assert divergence["because"].endswith(f"run {flips} of 3; 2 others made the same numbers")
