"""Plain tests on the planted faults: what it takes to find the same bugs without narrowfuzz.

``hypothesis`` and ``suite`` are the tests of ``plain_tests``. Each runs first without the fault: if
it fails there, it is a false alarm, and a failure under the fault would prove nothing. Then it runs
with the fault planted, on the same examples that passed. Every run is a process of its own, forked
from one with all imports done, so that a fault may abort it.

    python benchmarks/baselines.py --only 'cast-*' --seconds 20 --json out.json
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from narrowfuzz.machine.environment import prepare, settle

prepare()  # before torch is imported

import torch  # noqa: E402
from narrowfuzz.plants.plant import Plant  # noqa: E402
from narrowfuzz.plants.registry import builtin_faults, load_plants  # noqa: E402
from narrowfuzz.recipe.recipe import Recipe, load_every, runnable  # noqa: E402
from plain_tests import MOST_EXAMPLES, Outcome, as_shipped, compiled  # noqa: E402

#: A run that neither ends nor checks its clock is killed after this multiple of its seconds (plus
#: 300 s).
_PATIENCE = 15

Test = Callable[[Sequence[Recipe], float, int, int], Outcome]


@dataclass(frozen=True)
class BaselineResult:
    """The result of one plain test on one planted fault."""

    found: bool
    #: Duration of the run with the fault planted.
    seconds: float
    cases: int
    why: str
    #: The test fails without the fault too.
    false_alarm: bool = False


def hypothesis(fault: Plant, seconds: float, seed: int) -> BaselineResult:
    """The test that compares eager with torch.compile on drawn layers."""
    return _found(compiled, fault, seconds, seed)


def suite(fault: Plant, seconds: float, seed: int) -> BaselineResult:
    """The test with the shapes and thresholds of the libraries' own suites, once."""
    return _found(as_shipped, fault, seconds, seed)


BASELINES = {"hypothesis": hypothesis, "suite": suite}


def _found(test: Test, fault: Plant, seconds: float, seed: int) -> BaselineResult:
    recipes = _under(fault)
    clean = _without(test, tuple(recipe.name for recipe in recipes), seconds, seed)
    if clean.failure:
        return BaselineResult(False, 0.0, clean.cases, f"without it: {clean.failure}", True)
    if clean.not_applicable:
        return BaselineResult(False, 0.0, 0, f"not applicable: {clean.not_applicable}")
    start = time.perf_counter()
    # time enough for exactly the cases that passed
    work = partial(test, recipes, seconds * _PATIENCE, seed, clean.cases)
    outcome = _apart(work, recipes, fault, seconds)
    spent = time.perf_counter() - start
    return BaselineResult(bool(outcome.failure), spent, outcome.cases, outcome.failure)


@cache
def _without(test: Test, names: tuple[str, ...], seconds: float, seed: int) -> Outcome:
    recipes = [_recipes()[name] for name in names]
    return _apart(partial(test, recipes, seconds, seed, MOST_EXAMPLES), recipes, None, seconds)


@cache
def _recipes() -> dict[str, Recipe]:
    """All recipes that run on this machine's CPU, by name."""
    return {name: able for name, r in load_every().items() if (able := runnable(r, "cpu"))}


def _under(fault: Plant) -> list[Recipe]:
    """The recipes on which the fault is tested: those it can affect that can share a process with
    the first of them. Raises ValueError if none runs here."""
    chosen = [
        recipe
        for name, recipe in _recipes().items()
        if any(fnmatch.fnmatchcase(name, glob) for glob in fault.recipes)
    ]
    if not chosen:
        raise ValueError(f"no recipe runs here that {', '.join(fault.recipes)} names")
    together = [recipe for recipe in chosen if recipe.process == chosen[0].process]
    together[0].provide()
    return [recipe for recipe in together if type(recipe) is type(together[0])]


def _apart(
    work: Callable[[], Outcome],
    recipes: Sequence[Recipe],
    fault: Plant | None,
    seconds: float,
) -> Outcome:
    """``work`` in a child process, with or without a fault planted. If the child is killed by a
    signal, that counts as a failure of the test."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            signal.alarm(int(seconds * _PATIENCE) + 300)
            os.write(writing, json.dumps(asdict(_planted(work, recipes, fault))).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code <= 0, "the test itself is at fault"
    if code == 0:
        return Outcome(**json.loads(text))
    if code == -signal.SIGALRM:
        return Outcome(0, not_applicable="it did not end")
    return Outcome(0, failure=f"{signal.Signals(-code).name} ends its process")


def _planted(
    work: Callable[[], Outcome], recipes: Sequence[Recipe], fault: Plant | None
) -> Outcome:
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    recipes[0].prepare()
    # faults may share compiled kernels, which are cached by their source, but no cached graphs
    with (
        inductor.patch(fx_graph_cache=False),
        functorch.patch(enable_autograd_cache=False),
    ):
        if fault is None:
            return work()
        with fault.plant():
            return work()


def _warm_up() -> None:
    """Import and compile once, so that the children need not. Only a forward runs, since a child
    of a process that has run a backward cannot run one."""
    importlib.import_module("torchao.float8")
    norm = torch.compile(torch.nn.RMSNorm(32, dtype=torch.bfloat16))
    with torch.no_grad():
        norm(torch.randn(32, 32, dtype=torch.bfloat16))
    torch._dynamo.reset()


def recall(
    faults: dict[str, Plant], seconds: float, seed: int
) -> dict[str, dict[str, BaselineResult]]:
    """Run both tests on every fault and print each result."""
    results: dict[str, dict[str, BaselineResult]] = {}
    for name, fault in faults.items():
        results[name] = {b: test(fault, seconds, seed) for b, test in BASELINES.items()}
        outcomes = (f"{b}: {_word(r)} {r.seconds:.0f} s" for b, r in results[name].items())
        print(f"{name:38} {'; '.join(outcomes)}", flush=True)
    return results


def shared(
    file: Path | None, names: Sequence[str], workers: int, seconds: float, seed: int
) -> dict[str, dict[str, BaselineResult]]:
    """``recall`` split over several processes, each a fork of this one."""
    shares = [names[i::workers] for i in range(workers)]
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as forks:
        parts = forks.map(partial(_share, file, seconds, seed), shares)
        return {name: result for part in parts for name, result in part.items()}


def _share(
    file: Path | None, seconds: float, seed: int, names: Sequence[str]
) -> dict[str, dict[str, BaselineResult]]:
    known = load_plants(file) if file else builtin_faults()
    return recall({name: known[name] for name in names}, seconds, seed)


def _word(result: BaselineResult) -> str:
    if result.false_alarm:
        return "false alarm"
    return "found" if result.found else "missed"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="*", metavar="GLOB", help="ids of faults")
    parser.add_argument(
        "--fault-file", type=Path, help="faults of this file, not the built-in ones"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="for the Hypothesis test")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args(arguments)
    settle()
    known = load_plants(args.fault_file) if args.fault_file else builtin_faults()
    names = fnmatch.filter(known, args.only)
    with tempfile.TemporaryDirectory(prefix="narrowfuzz-baselines-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        _warm_up()
        results = shared(args.fault_file, names, args.workers, args.seconds, args.seed)
    for baseline in BASELINES:
        words = [_word(each[baseline]) for each in results.values()]
        counts = ", ".join(f"{words.count(w)} {w}" for w in ("found", "missed", "false alarm"))
        print(f"{baseline}: {counts} of {len(words)}")
    if args.json:
        plain: dict[str, Any] = {
            name: {b: asdict(r) for b, r in each.items()} for name, each in results.items()
        }
        args.json.write_text(json.dumps({"torch": torch.__version__, "faults": plain}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
