"""The questions of a first day on a GPU, and the commands that answer them."""

from __future__ import annotations

import sys
from dataclasses import dataclass

RUN = (sys.executable, "-m", "narrowfuzz")


@dataclass(frozen=True)
class Part:
    """One command of a step. ``minutes`` is its share of the day's time; it writes to the file or
    folder ``name``."""

    name: str
    minutes: float
    command: tuple[str, ...]
    #: Exit codes that answer yes.
    good: tuple[int, ...] = (0,)
    #: Numbers of the result that must not be 0.
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """Parts that together answer one question."""

    name: str
    question: str
    parts: tuple[Part, ...]


def run(
    name: str,
    minutes: float,
    *globs: str,
    arms: tuple[str, ...] = ("eager*",),
    operators: tuple[str, ...] = (),
    needs: tuple[str, ...] = ("cases",),
) -> Part:
    """A campaign on these recipes or single operators. New findings about refusals and conversions
    are stored but do not count for the answer."""
    chosen = [text for glob in globs for text in ("--recipe", glob)]
    chosen += [text for glob in operators for text in ("--operator", glob)]
    chosen += [text for arm in arms for text in ("--arm", arm)]
    how = ("--seed", "1", "--workers", "{workers}", "--minutes", "{minutes}", "--out", "{out}")
    command = (*RUN, "run", *chosen, *how, "--device", "{device}")
    return Part(name, minutes, command, (0, 1), needs)


BASELINES = ("torch.bf16", "torch.fp32", "torch.fp16")
COMPILED = ("eager", "aot_eager*", "inductor*")
FAULTS = ("gemm-gain", "gemm-narrow-accumulator", "layer-gain", "recompute-drifts")
#: Selects the properties that hold for recipes without quantisation.
PLAIN = "contract or determinism or gemm or layer or permutation or batching"
STEPS = (
    Step("probe", "Are our assumptions true?", (
        Part("probe", 4.0, (sys.executable, "benchmarks/gpu_probe.py", "--device", "{device}",
                            "--out", "{out}.json")),
    )),
    Step("baselines", "Is it silent on plain torch?", (
        run("baselines", 3.0, *BASELINES),
        Part("properties", 2.0, (
            sys.executable, "-m", "pytest", "-q", "properties/test_rules.py", "--nf-profile",
            "smoke", "--nf-device", "{device}", "--nf-recipe", "torch.bf16", "--nf-recipe",
            "torch.fp32", "-k", f"test_rules and ({PLAIN})",
        )),
    )),
    Step("operators", "Do the bounds of PyTorch's operators hold?", (
        run("operators", 3.0, *BASELINES, operators=("*",)),
        run("compiled-operators", 2.0, "torch.bf16", "torch.fp32", arms=COMPILED, operators=("*",),
            needs=("cases", "compiles")),
    )),
    Step("eager", "Do the bounds hold on FP8?", (
        run("float8", 5.0, "torch.scaled_mm", "torchao.float8.*"),
        run("blockwise", 1.5, "torchao.blockwise_fp8"),
        run("mxfp8", 1.0, "torchao.mxfp8.*"),
        run("schedules", 0.5, "reference.delayed"),
    )),
    Step("compiled", "Do taps and the rules of compiled rungs hold?", (
        run("compiled-baselines", 3.0, "torch.bf16", "torch.fp32", arms=COMPILED,
            needs=("cases", "compiles")),
        run("compiled-float8", 5.0, "torchao.float8.*", arms=COMPILED,
            needs=("cases", "compiles")),
    )),
    Step("faults", "Does it find anything, and survive?", (
        Part("score", 5.0, (
            *RUN, "score", "--no-controls", "--device", "{device}", "--seconds", "{quarter}",
            "--seed", "1", "--json", "{out}.json", *[t for f in FAULTS for t in ("--only", f)],
        )),
        Part("seed-bug", 3.0, (
            sys.executable, "benchmarks/seed_bug.py", "--device", "{device}",
        )),
        Part("lost", 1.0, (
            *RUN, "run", "--plant", "device-lost", "--recipe", "torchao.float8.rowwise",
            "--arm", "eager", "--workers", "1", "--seed", "1", "--minutes", "{minutes}",
            "--out", "{out}", "--device", "{device}",
        ), good=(1,), needs=("lost_workers",)),
    )),
)  # fmt: skip
#: Parts that a simulated GPU cannot run: compilers and Triton's kernels need a real one.
NOT_SIMULATED = (
    "blockwise", "compiled-baselines", "compiled-float8", "compiled-operators", "seed-bug",
)  # fmt: skip
