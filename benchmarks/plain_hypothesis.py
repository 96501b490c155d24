"""What the benchmark compares with: raw PyTorch, and a plain Hypothesis test.

``raw_torch`` builds and runs the same layers and judges nothing. ``one_compile_per_example`` is the
property test one would write without narrowfuzz's campaign: every example builds and compiles its
own program. Both get the Specs that narrowfuzz itself was given.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from harness.arms.program import LinearModel
from harness.arms.tensors import TORCH_DTYPE
from harness.case import Case, Compile, Spec
from harness.judge import Judge
from harness.ledger import load_ledger
from harness.recipe import Recipe, load_recipes
from harness.strategies import batches

Batch = tuple[Case, ...]
#: One run of Hypothesis: its seed, and how many Specs were judged in it.
Slice = tuple[int, int]


def generate(strategy: Any, test: Callable[[Any], None], *, number: int, examples: int) -> None:
    """One run of Hypothesis with the campaign's settings: generation only, seeded."""

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


def fresh_compile_cache() -> None:
    """Compiled artefacts of earlier runs must not help: an empty folder for this process."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="narrowfuzz-bench-")


def warm_up(judge: Judge, kind: Compile) -> None:
    """Compile once outside the clock: imports, the compiler's probes, precompiled headers."""
    rng = random.Random(0)
    for recipe in ("torch.bf16", "torchao.float8.rowwise"):
        spec = Spec(recipe=recipe, backend=judge.recipes[recipe].backends[0], m=8, k=8, n=8)
        spec = _with(spec, compile=kind)
        data = _with(Case(spec=spec, data=_data()).data, seed=rng.getrandbits(32))
        judge.judge(Case(spec=spec, data=data))


def _with(struct: Any, **changes: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(struct, **changes)


def _data() -> Any:
    from harness.case import DataSpec

    return DataSpec()


def raw_torch(
    recipes: Mapping[str, Recipe], specs: Sequence[Spec], draws: int, *, build_each: bool
) -> float:
    """Cases a second of building a layer and running it twice, forward and backward.

    ``build_each``: build and convert for every case; otherwise once a Spec, as narrowfuzz does.
    """
    start = time.perf_counter()
    for spec in specs:
        dtype = TORCH_DTYPE[spec.dtype]
        model: Any = None
        for _ in range(draws):
            if model is None or build_each:
                model = recipes[spec.recipe].convert(LinearModel(spec, "cpu"), spec)
            x = torch.randn(spec.input_shape, dtype=dtype, requires_grad=True)
            g = torch.randn(spec.output_shape, dtype=dtype)
            for _ in range(2):
                model(x).backward(g)
    return len(specs) * draws / (time.perf_counter() - start)


def one_compile_per_example(
    kind: Compile, names: Sequence[str], slices: Sequence[Slice], draws: int, limit: float
) -> dict[str, Any]:
    """A plain Hypothesis test over the Specs of ``slices``: one example, one draw, one compile."""
    fresh_compile_cache()
    recipes = load_recipes()
    judge = Judge(recipes, load_ledger())
    warm_up(judge, kind)
    strategy = batches([recipes[n] for n in names], compile=kind, draws=draws, largest=64)
    seen: list[str] = []
    start = time.perf_counter()
    for number, count in slices:
        left = count

        def test(batch: Batch) -> None:
            nonlocal left
            if left == 0 or time.perf_counter() - start > limit:
                return
            left -= 1
            judge._programs.clear()
            judge._repeated.clear()
            torch._dynamo.reset()
            if judge.judge(batch[0]).ran:
                seen.append(batch[0].id)

        generate(strategy, test, number=number, examples=count)
    seconds = time.perf_counter() - start
    return {"cases": len(seen), "seconds": seconds, "compiles": judge.compiles}
