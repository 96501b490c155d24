"""What the benchmark compares with: raw PyTorch, and a plain Hypothesis test.

``raw_torch`` builds and runs layers and judges nothing. ``one_compile_per_example`` is the property
test one would write without a campaign: every example builds and compiles its own program. Both get
the very Specs that narrowfuzz was given.
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

from harness.arms.program import LinearModel
from harness.arms.tensors import TORCH_DTYPE
from harness.campaign.config import Config
from harness.campaign.store import Store
from harness.campaign.worker import _SLICES, _Worker
from harness.case import Case, Compile, DataSpec, Spec, compile_key
from harness.judge import Judge, Judgement
from harness.ledger import load_ledger
from harness.recipe import Recipe, load_recipes, runnable
from harness.strategies import batches

#: One run of Hypothesis: its seed, and the keys of the Specs narrowfuzz judged in it.
Slice = tuple[int, list[str]]


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
    """Compile twice before the clock starts, with no artefact of an earlier run at hand.

    The first compile of a process pays for imports, probes of the C++ compiler and precompiled
    headers; both sides are spared that.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="narrowfuzz-bench-")
    for name in ("torch.bf16", "torchao.float8.rowwise"):
        backend = judge.recipes[name].backends[-1]
        spec = Spec(recipe=name, backend=backend, m=8, k=8, n=8, compile=kind)
        judge.judge(Case(spec=spec, data=DataSpec()))
    judge.compiles = 0


def raw_torch(
    recipes: Mapping[str, Recipe], specs: Sequence[Spec], draws: int, *, build_each: bool
) -> float:
    """Cases a second of building a layer and running it twice, forward and backward.

    ``build_each``: build and convert for every case; otherwise once a Spec, as narrowfuzz does.
    """
    start = time.perf_counter()
    for spec in specs:
        dtype, model = TORCH_DTYPE[spec.dtype], None
        for _ in range(draws):
            if model is None or build_each:
                model = recipes[spec.recipe].convert(LinearModel(spec, "cpu"), spec)
            x = torch.randn(spec.input_shape, dtype=dtype, requires_grad=True)
            g = torch.randn(spec.output_shape, dtype=dtype)
            for _ in range(2):
                model(x).backward(g)
    return len(specs) * draws / (time.perf_counter() - start)


def quiet_worker(
    out: Path, arms: tuple[str, ...] = (), after: Callable[[int], None] = lambda cases: None
) -> Any:
    """A campaign's worker without its process: its slices, draws, rules and caches.

    It does not triage what it finds, and calls ``after`` with the number of cases judged so far.
    """

    class Worker(_Worker):
        judged = 0
        keys: ClassVar[list[str]] = []

        def _judge(
            self, case: Case, oracles: Sequence[Any], only: frozenset[str] | None = None
        ) -> Judgement:
            key = compile_key(case.spec)
            if self.keys[-1:] != [key]:
                self.keys.append(key)
            judgement = super()._judge(case, oracles, only)
            self.judged += judgement.ran
            after(self.judged)
            return judgement

        def _triage(self, case: Case, verdict: Any) -> None:
            pass

        def flush(self, *, final: bool = False) -> None:
            self.counts.clear()
            self.reported = time.monotonic()

    Store(out)
    _, sending = mp.Pipe(duplex=False)
    return Worker(Config(out=out, workers=1, seed=1, arms=arms), 0, 0, math.inf, sending)


def many_draws_per_compile(kind: Compile, seconds: float) -> dict[str, Any]:
    """The campaign's worker on one rung of its ladder: its own slices, one after the other."""
    length = dict(_SLICES)[kind]
    slices: list[Slice] = []
    with tempfile.TemporaryDirectory() as out:
        worker = quiet_worker(Path(out))
        warm_up(worker.judge, kind)
        start = time.perf_counter()
        worker.deadline = until = time.monotonic() + seconds
        while time.monotonic() < until:
            state = worker.rng.getstate()
            number = worker.rng.getrandbits(64)
            worker.rng.setstate(state)
            before = len(worker.keys)
            worker._slice(kind, min(until, time.monotonic() + length))
            slices.append((number, worker.keys[before:]))
        spent = time.perf_counter() - start
    return {
        "cases": worker.judged, "seconds": spent, "compiles": worker.judge.compiles,
        "keys": worker.keys, "slices": slices,
    }  # fmt: skip


def one_compile_per_example(kind: Compile, slices: Sequence[Slice], limit: float) -> dict[str, Any]:
    """A plain Hypothesis test over the Specs of ``slices``: one example, one draw, one compile."""
    recipes = load_recipes()
    judge = Judge(recipes, load_ledger())
    warm_up(judge, kind)
    here = [able for r in recipes.values() if (able := runnable(r, "cpu"))]
    strategy = batches(here, compile=kind, draws=4, largest=64)
    keys: list[str] = []
    cases, start = 0, time.perf_counter()

    def test(batch: tuple[Case, ...]) -> None:
        nonlocal cases
        key = compile_key(batch[0].spec)
        if key in wanted and time.perf_counter() - start < limit:
            wanted.remove(key)
            judge._programs.clear()
            judge._repeated.clear()
            torch._dynamo.reset()
            keys.append(key)
            cases += judge.judge(batch[0]).ran

    for number, served in slices:
        wanted = list(served)
        generate(strategy, test, number=number, examples=6)
    seconds = time.perf_counter() - start
    return {"cases": cases, "seconds": seconds, "compiles": judge.compiles, "keys": keys}
