"""Check the rules' assumptions about a device: the first step of ``make gpu``.

    python benchmarks/gpu_probe.py --device cuda --out probe.json

The answer to each question is an observation and whether the assumption holds; if it cannot be
checked here, the observation is the reason. Exit code 1: an assumption does not hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from narrowfuzz.arms.available import options_on, unavailable
from narrowfuzz.arms.program import Program
from narrowfuzz.case.arm import EAGER, INDUCTOR, INDUCTOR_STRICT
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.machine.device import Device, check_device, enter
from narrowfuzz.machine.environment import prepare, versions
from narrowfuzz.machine.policy import cast_policies
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.operators import BY_NAME as OPERATORS
from narrowfuzz.play.watches import ATTENTION, AttentionWatch
from narrowfuzz.power.effect import digest
from narrowfuzz.recipe.recipe import load_recipes
from torch.utils._python_dispatch import TorchDispatchMode

#: Runs that must give the same bits.
REPEATS = 100
#: Two divisions, each 2 units in the last place off, in units of 2^-24.
_ALLOWED = 8.0


@dataclass(frozen=True)
class Answer:
    """``holds`` is None if nothing depends on the answer, or if the check could not run, for the
    reason in ``seen``."""

    question: str
    seen: Any
    holds: bool | None


def forks(device: Device) -> Answer:
    """The process from which workers are forked must not initialise CUDA in its imports."""
    code = (
        "import os, narrowfuzz.campaign.preload, narrowfuzz.campaign.worker, torch\n"
        "if os.fork() == 0:\n"
        "    torch.cuda.init()\n"
        "    print('works', flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    question = "CUDA works in a process that is forked after the fork server's imports"
    if device.name == "simulated":
        return Answer(question, "it needs a GPU that is not simulated", None)
    lines = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
    return Answer(question, lines[-1], lines[-1] == "works")


def casts(device: Device) -> Answer:
    """Do the device's casts agree with the CPU's?"""
    here, there = cast_policies("cpu"), cast_policies(device.torch)
    other = {name: (here[name], there[name]) for name in here if here[name] != there[name]}
    # a kernel may flush products of subnormals or not: bound 3.2 allows both
    held = not {name for name in other if "subnormal" not in name}
    return Answer("casts are the CPU's", other or "alike", held)


def adds(device: Device) -> Answer:
    """Do the device's accumulators, measured, behave as expected?"""
    return Answer("it adds as expected", device.profile(), not device.disagreements())


def precision(device: Device) -> Answer:
    """Are the imprecise modes that ``settle`` switches off still off?"""
    matmul = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction",
             "allow_tf32")  # fmt: skip
    seen = {name: getattr(matmul, name) for name in names}
    return Answer("no sums in the operands' dtype, no TF32", seen, not any(seen.values()))


class _Names(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def attention(device: Device) -> Answer:
    """Which attention kernel runs, by dtype and head size? Rules only see those of
    ``ATTENTION``."""
    seen: dict[str, str] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for size in (8, 16, 32, 64, 128):
            q, k, v = (
                torch.randn(1, 2, 16, size, device=device.torch, dtype=dtype, requires_grad=True)
                for _ in range(3)
            )
            with torch.no_grad(), AttentionWatch():  # without a backward nothing is saved
                F.scaled_dot_product_attention(q, k, v, is_causal=True)
            with _Names() as watch:
                F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
            kernels = {n for n in watch.names if n.startswith("_scaled_dot_product")}
            seen[f"{str(dtype).removeprefix('torch.')} {size}"] = ", ".join(sorted(kernels))
    held = all(name.startswith(ATTENTION) for one in seen.values() for name in one.split(", "))
    return Answer("attention runs in kernels that are watched", seen, held)


def generated(device: Device) -> Answer:
    """How exact are divisions in Inductor's generated code, and are subnormals flushed?"""
    question = "generated code divides as far off as O3 allows"
    if reason := unavailable(INDUCTOR, device.name):
        return Answer(question, reason, None)
    x = torch.rand(4096, device=device.torch) * 7 + 0.01
    y = torch.full_like(x, 448.0)
    small = torch.full((64,), 2.0**-130, device=device.torch)
    seen: dict[str, Any] = {}
    for arm in (INDUCTOR, INDUCTOR_STRICT):
        made = partial(torch.compile, options=options_on(arm, device.torch) or None)
        for name, quotient, exact in (
            ("quotients", made(lambda s, t: s / t)(y, x), y.double() / x.double()),
            ("reciprocals", made(lambda t: t.reciprocal())(x), 1.0 / x.double()),
        ):
            off = (quotient.double() / exact - 1).abs().max().item() * 2.0**24
            seen[f"{arm.name}: {name}, units of 2^-24 off"] = round(off, 2)
        is_kept = (made(lambda t: t * 0.5)(small).cpu() == 2.0**-131).all()
        seen[f"{arm.name}: products of subnormals kept"] = bool(is_kept)
        torch._dynamo.reset()
    far = [off for off in seen.values() if isinstance(off, float)]
    return Answer(question, seen, max(far) <= _ALLOWED)


def refusals(device: Device) -> Answer:
    """Does CUDA's FP8 multiply refuse exactly what the recipes expect it to refuse?"""
    e4m3, e5m2, bf16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
    questions = {
        "K = 24": (32, 24, 32, e4m3, bf16, False), "N = 24": (32, 32, 24, e4m3, bf16, False),
        "E5M2 x E5M2": (32, 32, 32, e5m2, bf16, False),
        "M = 8": (8, 32, 32, e4m3, bf16, False), "rowwise": (32, 32, 32, e4m3, bf16, True),
    }  # fmt: skip
    seen = {name: _multiply_outcome(device, *how) for name, how in questions.items()}
    runs = {name for name, outcome in seen.items() if outcome == "runs"}
    question = "it refuses what the rules say, and nothing else"
    return Answer(question, seen, runs == {"M = 8", "rowwise"})


def _multiply_outcome(
    device: Device, m: int, k: int, n: int, dtype: torch.dtype, out: torch.dtype, rowwise: bool
) -> str:
    a, b = (torch.ones(rows, k, device=device.torch).to(dtype) for rows in (m, n))
    shapes = ((m, 1), (1, n)) if rowwise else ((), ())
    scales = (torch.ones(shape, device=device.torch) for shape in shapes)
    try:
        torch._scaled_mm(a, b.t(), *scales, out_dtype=out)
        torch.cuda.synchronize()
    except (RuntimeError, ValueError) as error:
        return str(error).strip().splitlines()[0]
    return "runs"


def repeats(device: Device) -> Answer:
    """Does every model, in plain torch, give the same bits each time? Models with operators that
    torch documents to sum in any order are skipped."""
    recipes = load_recipes()
    judge = Judge(recipes, Ledger([]), frozenset({EAGER.name}), device=device)
    seen: dict[str, int | str] = {}
    for name, model in MODELS.items():
        if why := model.why_not(device.torch.partition(":")[0], ["bf16"]):
            seen[name] = why
            continue
        spec = Spec(recipe="torch.bf16", model=name, m=128, k=64, n=64, heads=2, batch=2)
        case = Case(spec=spec, data=DataSpec(seed=1))
        calls = [call for trace in judge.run_arms(case).values() for call in trace.operators]
        if any(OPERATORS[call.operator].unordered(call) for call in calls):
            seen[name] = "adds up in any order"
        else:
            # only outputs, not all operators' results: those may have rows of no group, unwritten
            made = (judge.run_arms(case).values() for _ in range(REPEATS))
            seen[name] = len({digest([trace.outputs for trace in traces]) for traces in made})
    counted = {found for found in seen.values() if isinstance(found, int)}
    return Answer(f"{REPEATS} runs give the same bits", seen, counted == {1})


def times(device: Device) -> Answer:
    """Milliseconds of a tapped run of a linear, the fastest of 20."""
    recipes = load_recipes()
    seen: dict[str, float | str] = {}
    for name in ("torch.bf16", "torchao.float8.rowwise", "torchao.mxfp8.rceil"):
        backend = "real" if "float8" in name else ""
        spec = Spec(recipe=name, backend=backend, m=64, k=128, n=64)
        program = Program(spec, recipes[name], EAGER, device=device.torch)
        tensors, spent = tensors_of(Case(spec=spec, data=DataSpec()), recipes[name]), []
        for _ in range(20):
            start = time.perf_counter()
            trace = program.run(tensors, tap=True)
            spent.append((time.perf_counter() - start) * 1e3)
        seen[name] = trace.error.message if trace.error else round(min(spent), 2)
    return Answer("milliseconds of a tapped run of a linear", seen, None)


QUESTIONS: tuple[Callable[[Device], Answer], ...] = (
    forks, casts, adds, precision, attention, generated, refusals, repeats, times,
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or simulated")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    check_device(args.device)
    prepare()
    device = enter(args.device, 0)
    answers: list[Answer] = []
    record: dict[str, Any] = {"versions": versions(), "device": device.describe()}
    for question in QUESTIONS:
        try:
            answers.append(question(device))
        except Exception:  # noqa: BLE001 - a question that fails must not end the others
            answers.append(Answer(question.__name__, traceback.format_exc()[-2000:], False))
        record["answers"] = [asdict(answer) for answer in answers]
        args.out.write_text(json.dumps(record, indent=2, default=str) + "\n")
        how = {True: "yes", False: "NO", None: "said"}[answers[-1].holds]
        text = json.dumps(answers[-1].seen, default=str)
        print(f"{how:6}{answers[-1].question}: {text}", flush=True)
    return int(any(answer.holds is False for answer in answers))


if __name__ == "__main__":
    sys.exit(main())
