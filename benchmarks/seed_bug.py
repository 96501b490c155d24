"""``make seed-bug``: the bug that narrowfuzz was made for, planted on a CPU and measured.

K is recomputed in backward with another rounding than in forward, while attention's log-sum-exp
was saved. Each row is one arm of one model, with Inductor as released or with the planted fault:
the share of K that changed, the verdicts of the rules, and the result of comparing gradients with
eager.

Artefacts compiled with and without the fault must not mix, so every row that differs in fault or
arm is measured without caches, and all of it runs in a folder of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from narrowfuzz.arms.program import Program
from narrowfuzz.arms.twin import twin_outputs
from narrowfuzz.case.arm import EAGER
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.machine.device import Device, check_device, enter
from narrowfuzz.numerics.accumulator import UNKNOWN, Accumulators
from narrowfuzz.numerics.formats import F32
from narrowfuzz.operators.attention_statistics import softmax_excess
from narrowfuzz.plants.registry import builtin_faults
from narrowfuzz.recipe.recipe import load_recipes
from narrowfuzz.rules.evidence import Evidence
from narrowfuzz.rules.recompute import check_recompute, check_statistics
from narrowfuzz.rules.whole import check_ratio
from narrowfuzz.trace.trace import Trace
from narrowfuzz.trace.verdict import Verdict

FAULT = "inductor-backward-drift"
ROWWISE = "torchao.float8.rowwise"
INDUCTOR, STRICT = "inductor+checkpoint_selective", "inductor_strict+checkpoint_selective"
#: torchao's own thresholds: the widest between compiled and bf16, and the signal-to-noise ratio of
#: grad_weight.
ALLCLOSE, SQNR_DB = 0.2, 17.0
#: The multiple of eager's error that torch's own accuracy check allows for bf16 results.
RMSE_RATIO = 3.0
#: Factor for wq and wk, which makes logits 64 times as large.
SHARP = 8.0


@dataclass(frozen=True)
class Row:
    """One run of one arm."""

    model: str
    recipe: str
    planted: bool
    rung: str
    #: The factor by which wq and wk were multiplied.
    gain: float
    #: Share of K's elements that differ between attention's backward and its forward.
    moved: float
    #: max|sum exp(qk - lse) - 1| over the rows, and the same in units of O18's bound.
    off: float
    excess: float
    o13: str
    o18: str
    o9: str
    #: Worst gradient: its error against float64 in units of eager's, and its SQNR against eager.
    error_ratio: float
    sqnr_db: float
    #: Whether all gradients are within torchao's tolerance against eager, and within torch's.
    allclose: bool
    rmse: bool


def spec_of(model: str, recipe: str = ROWWISE, backend: str = "real") -> Spec:
    """The smallest Spec of ``model`` that shows the bug."""
    return Spec(
        recipe=recipe, backend=backend, model=model, m=32, k=64, n=64, heads=2,  # type: ignore[arg-type]
        checkpoint="selective", compile="inductor",
    )  # fmt: skip


def measure(
    spec: Spec, rung: str, device: Device, *, planted: bool, gains: tuple[float, ...]
) -> list[Row]:
    """Compile once, then run and judge for every gain of wq and wk."""
    recipe = load_recipes()[spec.recipe]
    case = Case(spec=spec, data=DataSpec())
    rows = []
    with builtin_faults()[FAULT].plant() if planted else nullcontext():
        if not planted:
            torch._dynamo.reset()
        program, eager = (
            Program(spec, recipe, arm, device=device.torch) for arm in (BY_NAME[rung], EAGER)
        )
        for gain in gains:
            tensors = sharpened(tensors_of(case, recipe), gain)
            traces = {p.arm.name: p.run(tensors, tap=True, spec=spec) for p in (eager, program)}
            for trace in traces.values():
                wrong = (trace.error, trace.unusable_because)
                assert wrong == (None, ""), wrong
            evidence = Evidence(
                case=case, plan=recipe.plan(spec).added_by(device.accumulators, spec.dtype),
                accumulators=device.accumulators, tensors=tensors, traces=traces, repeats={},
                elides=frozenset({rung}), deviations={}, refusal="",
                twin=lambda: twin_outputs(spec, tensors),
            )  # fmt: skip
            rows.append(_row(evidence, rung, planted, gain))
    return rows


def sharpened(tensors: dict[str, F32], gain: float) -> dict[str, F32]:
    """The tensors with wq and wk multiplied by ``gain``."""
    return {
        name: t * np.float32(gain) if name.endswith(("wq.weight", "wk.weight")) else t
        for name, t in tensors.items()
    }


def _row(evidence: Evidence, rung: str, planted: bool, gain: float) -> Row:
    trace, eager = evidence.traces[rung], evidence.traces["eager"]
    spec, grads = evidence.spec, [n for n in sorted(trace.outputs) if "grad" in n]
    off, excess = _row_sums(trace, evidence.accumulators)
    return Row(
        model=spec.model, recipe=spec.recipe, planted=planted, rung=rung, gain=gain,
        moved=_moved_keys(trace), off=off, excess=excess,
        o13=_status(check_recompute(evidence), rung),
        o18=_status(check_statistics(evidence), rung),
        o9=_status(check_ratio(evidence), rung),
        error_ratio=max(_ratio(trace, eager, evidence, n) for n in grads),
        sqnr_db=min(_sqnr(trace.outputs[n], eager.outputs[n]) for n in grads),
        allclose=all(_close(trace.outputs[n], eager.outputs[n]) for n in grads),
        rmse=all(_ratio(trace, eager, evidence, n) <= RMSE_RATIO for n in grads),
    )  # fmt: skip


def _status(verdicts: Any, rung: str) -> str:
    """The status of the worst of a rule's verdicts on this arm."""
    found: list[Verdict] = [v for v in verdicts if v.arm == rung]
    return next((v.status for v in found if v.status == "diverged"), found[0].status)


def _moved_keys(trace: Trace) -> float:
    """Share of K's elements that differ between an attention's forward and its backward."""
    forwards = [c for c in trace.attention if c.phase == "forward"]
    shares = []
    for again in (c for c in trace.attention if c.phase == "backward"):
        kept = [f for f in forwards if np.array_equal(f.lse, again.lse)]
        assert len(kept) == 1, "one log-sum-exp, one forward"
        shares.append(float((kept[0].k != again.k).mean()))
    return max(shares)


def _row_sums(trace: Trace, adds: Accumulators) -> tuple[float, float]:
    """O18's measure of the worst attention: absolute, and in units of its bound."""
    measured = [
        softmax_excess(c, adds.get(f"attention {c.dtype}", UNKNOWN))
        for c in trace.attention
        if c.phase == "backward"
    ]
    worst = max(measured, key=lambda m: m.factor)
    return worst.factor * worst.allowed, worst.factor


def _ratio(trace: Trace, eager: Trace, evidence: Evidence, name: str) -> float:
    """Root mean square error against float64, in units of eager's."""
    exact = evidence.exact[name]
    far, base = (float(np.sqrt(np.mean((t.outputs[name] - exact) ** 2))) for t in (trace, eager))
    return far / base


def _close(got: F32, want: F32) -> bool:
    """Whether the two agree within torchao's widest tolerance, scaled to the size of ``want`` as it
    is meant for elements of order 1."""
    size = float(np.sqrt(np.mean(want.astype(np.float64) ** 2)))
    return bool(np.allclose(got, want, rtol=ALLCLOSE, atol=ALLCLOSE * size))


def _sqnr(got: F32, want: F32) -> float:
    noise = float(np.linalg.norm(want - got))
    return 20.0 * float(np.log10(np.linalg.norm(want) / noise)) if noise else float("inf")


#: Rows that are measured by default: model, recipe, backend, planted, arm.
PLANS = (
    ("llama_block", ROWWISE, "real", False, INDUCTOR),
    ("llama_block", ROWWISE, "real", True, INDUCTOR),
    ("llama_block", ROWWISE, "real", True, STRICT),
)
#: Additional rows with --wide: where else the bug shows, and where it cannot.
WIDE = (
    ("two_blocks", ROWWISE, "real", True, INDUCTOR),
    ("llama_block", ROWWISE, "emulated", True, INDUCTOR),
    ("llama_block", "torch.bf16", "", True, INDUCTOR),
    ("attention", ROWWISE, "real", True, INDUCTOR),
)
_HEAD = "model        recipe                  Inductor  rung            gain  K moved  row sums      O18/bound  O13       O18       O9        error/eager  SQNR dB  allclose  RMSE"  # noqa: E501


def line(row: Row) -> str:
    """A row of the table."""
    state = "planted" if row.planted else "shipped"
    return (
        f"{row.model:12} {row.recipe:23} {state:9} {row.rung.split('+')[0]:15} {row.gain:4.0f}  "
        f"{row.moved:7.2%}  {row.off:12.3g}  {row.excess:9.3g}  {row.o13:8.8}  {row.o18:8.8}  "
        f"{row.o9:8.8}  {row.error_ratio:11.3g}  {row.sqnr_db:7.1f}  "
        f"{'pass' if row.allclose else 'FAIL':8}  {'pass' if row.rmse else 'FAIL'}"
    )


def main() -> None:
    """Measure and print, as a table or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wide", action="store_true", help="other models and recipes as well")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or simulated")
    chosen = parser.parse_args()
    check_device(chosen.device)
    device = enter(chosen.device, 0)
    if not chosen.json:
        print(_HEAD)
    with tempfile.TemporaryDirectory(prefix="narrowfuzz-seed-bug-") as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        for model, recipe, backend, planted, rung in PLANS + (WIDE if chosen.wide else ()):
            spec = spec_of(model, recipe, backend)
            for row in measure(spec, rung, device, planted=planted, gains=(1.0, SHARP)):
                print(json.dumps(asdict(row)) if chosen.json else line(row), flush=True)


if __name__ == "__main__":
    main()
