"""Relations of single operators: how results must change, to the bit, when operands change,
whatever order the kernels add in. Measured on torch's own kernels for a CPU, and proven where a
docstring gives the proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: (Spec, number of rows of a tensor) -> the rows that no result may depend on.
Hides = Callable[[Any, int], range]


@dataclass(frozen=True)
class Relation:
    """If operands are multiplied by powers of two or their negatives, in all rows or in the hidden
    ones, then each listed result is multiplied by its factor."""

    #: The changed operands, as findings describe them: ``the negated grad_output``.
    words: str
    #: Operand -> its factor. ``input`` is the query of attention, ``grad_input`` its gradient.
    operands: Mapping[str, float] = field(hash=False)
    #: Result -> its factor. Other results are not compared.
    results: Mapping[str, float] = field(hash=False)
    #: The rows of the operands that are changed; their own gradients are not compared. None: all
    #: rows are changed, and everything is compared.
    hides: Hides | None = None
    #: True if it also holds in fp16, where subnormals are not rounded relatively.
    in_fp16: bool = True
    #: True if it also holds for optimizer steps, and for the parameters after them.
    steps: bool = False
    #: Why it does not hold for these operands of a Spec; "" if it does.
    excludes: Callable[[Any, Mapping[str, Any]], str] = lambda spec, operands: ""

    @property
    def scales(self) -> bool:
        """True if magnitudes change, and so may come closer to an end of their dtype's range."""
        return any(abs(by) != 1.0 for by in (*self.operands.values(), *self.results.values()))


def of_gradients(*parameters: str, input: bool = True, scaled: bool = True) -> tuple[Relation, ...]:
    """Every backward is linear in the output gradient: a negated one negates the gradients, and
    eight times that gives eight times the gradients, unless an intermediate number is subnormal.
    For operators with exponentials some are, hence ``scaled=False``."""
    names = [*(["grad_input"] if input else []), *(f"{name}.grad" for name in parameters)]
    negated = Relation(
        "the negated grad_output",
        {"grad_output": -1.0},
        {"output": 1.0, **dict.fromkeys(names, -1.0)},
    )
    times_8 = Relation(
        "grad_output times 8",
        {"grad_output": 8.0},
        {"output": 1.0, **dict.fromkeys(names, 8.0)},
        in_fp16=False,
    )
    return (negated, times_8) if scaled else (negated,)


def _last_quarter(spec: Any, rows: int) -> range:
    return range(rows - rows // 4, rows)


def _behind_the_last_query(spec: Any, rows: int) -> range:
    return range(min(spec.m, rows), rows)


def of_loss(ignored: int) -> tuple[Relation, ...]:
    """Relations of a loss on logits that a weight computes; the target of every ``ignored``-th row
    is ignored."""
    names = ("output", "grad_input", "weight.grad")
    return (
        *of_gradients("weight", scaled=False),
        Relation(
            "the negated logits of ignored rows",
            {"input": -1.0},
            dict.fromkeys(names, 1.0),
            hides=lambda spec, rows: range(0, rows, ignored),
        ),
    )


#: If no score is larger than this in magnitude, no probability is below e^-60 / (number of keys).
_SCORE = 30.0


def _scores_far_apart(spec: Any, operands: Mapping[str, Any]) -> str:
    """Why probabilities may be subnormal; "" if they cannot. Scores are bounded by Cauchy-Schwarz
    over all heads at once, and no head is narrower than k / heads."""
    longest = [(operands[name] ** 2).sum(axis=-1).max() ** 0.5 for name in ("input", "key")]
    scale = (spec.heads / spec.k) ** 0.5
    return "probabilities may be subnormal" if scale * longest[0] * longest[1] > _SCORE else ""


def of_attention(mask: str) -> tuple[Relation, ...]:
    """Relations of softmax(query key^T scale + mask) value. Scores do not change if query and key
    are multiplied by reciprocal factors; everything is linear in the values; and nothing depends on
    a key, or its value, that no query attends to."""
    q, k, v = "grad_input", "key.grad", "value.grad"
    hidden = {"padding": _last_quarter, "causal": _behind_the_last_query}.get(mask)
    same = {"output": 1.0, q: 1.0, k: 1.0, v: 1.0}
    unseen = [("keys", {"key": -1.0}), ("values", {"value": -1.0})] if hidden else []
    return (
        *of_gradients("key", "value", scaled=False),
        Relation(
            "the negated queries and keys", {"input": -1.0, "key": -1.0}, {**same, q: -1.0, k: -1.0}
        ),
        Relation(
            "the queries times 4, the keys divided by 4",
            {"input": 4.0, "key": 0.25},
            {**same, q: 0.25, k: 4.0},
            in_fp16=False,
            excludes=_scores_far_apart,
        ),
        Relation("the negated values", {"value": -1.0}, {"output": -1.0, q: -1.0, k: -1.0, v: 1.0}),
        Relation(
            "the values times 8",
            {"value": 8.0},
            {"output": 8.0, q: 8.0, k: 8.0, v: 1.0},
            in_fp16=False,
            excludes=_scores_far_apart,
        ),
        *(
            Relation(f"the negated {what} that no query sees", operands, same, hides=hidden)
            for what, operands in unseen
        ),
    )


def of_norm(weight: str, bias: str = "") -> tuple[Relation, ...]:
    """Relations of (x - mean) / std * weight + bias, which is odd in x and bias together, and
    linear in weight and bias together."""
    linear = [name for name in (weight, bias) if name]
    odd: dict[str, float] = {"input": -1.0, "grad_output": -1.0}
    signs: dict[str, float] = {"output": -1.0, "grad_input": -1.0, f"{weight}.grad": 1.0}
    if bias:
        odd[bias], signs[f"{bias}.grad"] = -1.0, -1.0
    scaled = dict.fromkeys((f"{name}.grad" for name in linear), 1.0)
    words = "weight and bias" if bias else "the weight"
    return (
        *of_gradients(*linear),
        Relation("everything negated but the weight", odd, signs),
        Relation(
            f"{words} times 8",
            dict.fromkeys(linear, 8.0),
            {"output": 8.0, "grad_input": 8.0, **scaled},
            in_fp16=False,
        ),
    )


def of_steps() -> tuple[Relation, ...]:
    """Relation of an optimizer's steps on x * weight + bias + sum(x): negating input, output
    gradient and bias leaves the weight's gradients, and so the weight, unchanged and negates the
    bias."""
    operands = dict.fromkeys(("input", "grad_output", "bias"), -1.0)
    negated = dict.fromkeys(("output", "grad_input", "bias.grad", "bias"), -1.0)
    results = {**negated, "weight.grad": 1.0, "weight": 1.0}
    return (Relation("everything negated but the weight", operands, results, steps=True),)


def of_steps_on_a_table() -> tuple[Relation, ...]:
    """Relation of an optimizer's steps on a table whose rows are the output: a negated table and
    output gradient negate everything."""
    operands = {"table": -1.0, "grad_output": -1.0}
    results = dict.fromkeys(("output", "table.grad", "table"), -1.0)
    return (Relation("the negated table and grad_output", operands, results, steps=True),)
