"""The baselines of the benchmark: raw PyTorch, and a plain Hypothesis test.

``raw_torch`` builds and runs layers and judges nothing. ``one_compile_per_example`` is the property
test that one would write without a campaign: every example builds and compiles its own program.
Both get the same Specs as narrowfuzz: single linears, which every rule judges.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy
from narrowfuzz.campaign.config import Config, Place
from narrowfuzz.campaign.slices import AGAIN, Slice
from narrowfuzz.campaign.worker import Worker
from narrowfuzz.case.arm import Compile
from narrowfuzz.case.spec import Case, DataSpec, Spec, compile_key, dump_case, load_case
from narrowfuzz.draw.specs import DIRECT
from narrowfuzz.draw.strategies import cases
from narrowfuzz.judge.judge import Judge, Judgement
from narrowfuzz.ledger.ledger import load_ledger
from narrowfuzz.machine.device import Device
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.play.dtypes import DTYPES
from narrowfuzz.recipe.recipe import Recipe, load_recipes, runnable
from narrowfuzz.report.store import Store


def generate(
    strategy: SearchStrategy[Any], test: Callable[[Any], None], *, number: int, examples: int
) -> None:
    """One run of Hypothesis with the campaign's settings: seeded, generation only."""

    @seed(number)
    @settings(
        max_examples=examples,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(drawn: Any) -> None:
        test(drawn)

    run()


def warm_up(judge: Judge, kind: Compile) -> None:
    """Compile twice before the clock starts, with an empty cache of artefacts.

    The first compile of a process also pays for imports, probes of the C++ compiler and precompiled
    headers, which should count for neither side.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="narrowfuzz-bench-")
    for name in ("torch.bf16", "torchao.float8.rowwise"):
        backend = judge.recipes[name].backends[-1]
        spec = Spec(recipe=name, backend=backend, m=8, k=8, n=8, compile=kind)
        judge.judge(Case(spec=spec, data=DataSpec()))
    judge.programs.compiles, judge.programs.compile_seconds = 0, 0.0


def raw_torch(
    recipes: Mapping[str, Recipe],
    specs: Sequence[Spec],
    draws: int,
    device: str,
    *,
    build_each: bool,
) -> float:
    """Cases per second of building a layer and running it twice, forward and backward.

    ``build_each``: build and convert for every case; otherwise once per Spec, as narrowfuzz does.
    """
    start = time.perf_counter()
    for spec in specs:
        dtype, model = DTYPES[spec.dtype], None
        for _ in range(draws):
            if model is None or build_each:
                model = MODELS[spec.model].build(spec, dtype=dtype, device=device)
                model = recipes[spec.recipe].convert(model, spec)
            x = torch.randn(spec.input_shape, dtype=dtype, device=device, requires_grad=True)
            g = torch.randn(spec.output_shape, dtype=dtype, device=device)
            for _ in range(2):
                model(x).backward(g)
    return len(specs) * draws / (time.perf_counter() - start)


def quiet_worker(
    out: Path, arms: tuple[str, ...] = (), after: Callable[[int], None] = lambda cases: None
) -> Any:
    """A campaign's worker, with its slices, draws, rules and caches, but in this process.

    It does not triage findings, and calls ``after`` with the number of cases judged so far.
    """

    class Quiet(Worker):
        ran = 0
        keys: ClassVar[list[str]] = []
        #: The first case of each of ``keys``, as text, and the names of the arms it was judged on.
        firsts: ClassVar[list[tuple[str, list[str]]]] = []

        def _judge(
            self,
            case: Case,
            rules: Sequence[Any],
            only: frozenset[str] | None = None,
            *,
            focus: int | None = None,
            repeat: bool = True,
        ) -> Judgement:
            key = compile_key(case.spec)
            if self.keys[-1:] != [key]:
                self.keys.append(key)
                arms = only or {arm.name for arm in self.judge.rungs(case.spec)}
                self.firsts.append((dump_case(case).decode(), sorted(arms)))
            judgement = super()._judge(case, rules, only, focus=focus, repeat=repeat)
            self.ran += judgement.ran
            after(self.ran)
            return judgement

        def _triage(
            self, case: Case, verdict: Any, past: Sequence[Case], *, most: float = 25.0
        ) -> None:
            pass

        def flush(self, *, final: str = "") -> None:
            self.counts.clear()
            self.reported = time.monotonic()

    Store(out)
    _, sending = mp.Pipe(duplex=False)
    models = ("torch.*", "torchao.*")  # without the recipes of schedules, which would alternate
    config = Config(out=out, workers=1, seed=1, recipes=models, arms=arms)
    return Quiet(config, Place(0, 0, 0, math.inf), sending, Device())


def many_draws_per_compile(kind: Compile, seconds: float) -> dict[str, Any]:
    """Run the campaign's worker on slices of linears with one value of ``Spec.compile``."""
    length = next(s.seconds for s in AGAIN if s.kind == kind)
    linears = Slice(kind, length, "linears")
    with tempfile.TemporaryDirectory() as out:
        worker = quiet_worker(Path(out))
        worker.generator.vary = DIRECT
        warm_up(worker.judge, kind)
        start = time.perf_counter()
        worker.deadline = until = time.monotonic() + seconds
        while time.monotonic() < until and not worker.worn_out:
            worker.serve(linears, min(until, time.monotonic() + length))
        spent = time.perf_counter() - start
    return {
        "cases": worker.ran, "seconds": spent, "compiles": worker.judge.programs.compiles,
        "compile_seconds": worker.judge.programs.compile_seconds, "keys": worker.keys,
        "firsts": worker.firsts,
    }  # fmt: skip


def one_compile_per_example(
    kind: Compile, firsts: Sequence[tuple[str, Sequence[str]]], limit: float
) -> dict[str, Any]:
    """A plain Hypothesis test: one example, one draw, one compile.

    Every example draws a case as such a test does, but then judges the next of ``firsts`` instead,
    on its arms: compile times differ too much to compare the two sides on different Specs.
    """
    recipes = load_recipes()
    judge = Judge(recipes, load_ledger())
    warm_up(judge, kind)
    here = [able for r in recipes.values() if (able := runnable(r, "cpu"))]
    strategy = cases(here, compile=kind, largest=64, vary=DIRECT)
    waiting = [(load_case(text.encode()), arms) for text, arms in reversed(firsts)]
    keys: list[str] = []
    judged, start = 0, time.perf_counter()

    def test(drawn: Case) -> None:
        nonlocal judged
        if not waiting or time.perf_counter() - start >= limit:
            return
        case, arms = waiting.pop()
        assert case.spec.direct, case
        judge.programs.clear()
        torch._dynamo.reset()
        keys.append(compile_key(case.spec))
        judged += judge.judge(case, None, frozenset(arms)).ran

    generate(strategy, test, number=1, examples=len(firsts))
    seconds = time.perf_counter() - start
    return {
        "cases": judged, "seconds": seconds, "compiles": judge.programs.compiles,
        "compile_seconds": judge.programs.compile_seconds, "keys": keys,
    }  # fmt: skip
