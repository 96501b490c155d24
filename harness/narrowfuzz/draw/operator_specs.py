"""Hypothesis strategies for Specs of one operator: lengths around the block sizes of kernels, and
heads as wide as in real models."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import strategies as st

from narrowfuzz.case.arm import Compile
from narrowfuzz.case.events import Reload, plain_training
from narrowfuzz.case.spec import ModelName, Spec
from narrowfuzz.draw.choices import sampled
from narrowfuzz.draw.specs import FACTORS, clipped, fixed, overflowing, scaled, specs
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.recipe.recipe import Recipe

#: Numbers of rows, keys and classes: around vectors of 8 and 16 and blocks of 32 to 768, and above
#: 256, from where bf16 does not represent every integer. Short and long are equally frequent.
_SHORT = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33)
_LONG = (63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 300, 511, 512, 513, 767, 768, 769)
#: Numbers of features per head.
_WIDTHS = (16, 32, 64, 8, 1, 2, 3, 5, 24, 33, 65, 80, 96, 100, 128, 200, 256)
#: Largest number of elements of an operand, and of the scores.
_OPERAND, _SCORES = 2**16, 2**15
#: Optimizers that leave most of a parameter in 16 bits unchanged on a CPU (the known issue
#: fused-sgd-skips-blocks).
_HIDING = ("sgd_fused", "sgd_momentum_fused")


@st.composite
def operator_specs(
    draw: st.DrawFn,
    recipes: Sequence[Recipe],
    models: tuple[ModelName, ...],
    *,
    compile: Compile = "none",
    vary: frozenset[str] = FACTORS,
) -> Spec:
    """A Spec of one of ``models``, each of which is one operator."""
    # these factors are drawn below, or do not change how an operator is called
    factors = vary - {"dims", "lifecycle", "schedule", "shape", "threads"}
    spec = draw(specs(recipes, compile=compile, vary=factors, models=models, linears=False))
    m, n = (draw(sampled(*(_LONG if draw(sampled(False, True)) else _SHORT))) for _ in "mn")
    k = draw(sampled(*_WIDTHS)) * spec.heads
    batch = max(spec.batch, 1)
    m, n = min(m, max(1, _OPERAND // (batch * k))), min(n, max(1, _OPERAND // k))
    pairs = max(1, _SCORES // (batch * spec.heads))
    if m * n > pairs:  # either one may be long, not both
        m, n = (m, max(1, pairs // m)) if draw(sampled(False, True)) else (max(1, pairs // n), n)
    layout = spec.input_layout
    if MODELS[spec.model].attends and draw(sampled(True, True, True, False)):
        layout = "contiguous"  # fused kernels accept no other
    if MODELS[spec.model].takes_ids and draw(sampled(True, True, True, False)):
        n = min(n, max(1, batch * m // 2))  # ids that repeat
    grad_mode = spec.grad_mode if draw(sampled(False, False, False, True)) else "train"
    recipe = next(r for r in recipes if r.name == spec.recipe)
    several = compile == "none" and "threads" in vary
    threads = draw(sampled(1, 1, 1, 1, 1, 2, 4, 4)) if several else 1
    drawn = msgspec.structs.replace(
        spec, m=m, k=k, n=n, input_layout=layout, grad_mode=grad_mode, threads=threads
    )
    if "optimizer" not in MODELS[spec.model].fixed:
        return fixed(drawn, recipe)
    # a strided parameter has gaps that its gradient has not, which tests the optimizer's step; but
    # not where fused-sgd-skips-blocks would hide whatever follows
    hidden = fixed(drawn, recipe).optimizer in _HIDING and drawn.dtype != "fp32"
    layouts = (drawn.weight_layout, "contiguous", "contiguous", "strided")
    weight_layout = draw(sampled(*(("contiguous",) if hidden else layouts)))
    drawn = msgspec.structs.replace(
        drawn,
        loss_scaling=draw(scaled(drawn.dtype)),
        clipping=draw(clipped(drawn.model)),
        weight_layout=weight_layout,
    )
    steps = draw(sampled(2, 3, 5))
    plain = events = plain_training(steps, 1, "train")
    if draw(sampled(False, False, True)):
        events = (*events[:3], Reload(), *events[3:])
    if drawn.loss_scaling != "none":
        events = draw(overflowing(events))
    if events == plain:
        return fixed(msgspec.structs.replace(drawn, steps=steps, events=()), recipe)
    trained = msgspec.structs.replace(drawn, steps=1, microbatches=1, events=events)
    return fixed(trained, recipe)
