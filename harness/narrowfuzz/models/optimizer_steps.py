"""Models whose optimizer's steps are judged: a weight and a bias, or a table of rows, by each of
torch's optimizers and torchao's low-bit ones."""

from __future__ import annotations

import math
from typing import Any

from narrowfuzz.models.model import Arguments, Model
from narrowfuzz.models.relations import of_steps, of_steps_on_a_table
from narrowfuzz.models.single_operator import has, operator_model

#: Optimizer, by its name in a Spec -> the operator of its step.
_STEPS = {
    "sgd": "sgd_step",
    "sgd_foreach": "sgd_step",
    "sgd_fused": "sgd_step",
    "sgd_momentum": "sgd_step",
    "sgd_momentum_fused": "sgd_step",
    "adamw": "adam_step",
    "adam_foreach": "adam_step",
    "adam_fused": "adam_step",
    "adamw_foreach": "adam_step",
    "adamw_fused": "adam_step",
    "adagrad": "adagrad_step",
    "adagrad_foreach": "adagrad_step",
    "adagrad_fused": "adagrad_step",
}
#: Value classes for optimizer steps: moments of very different size, and squares of small numbers.
_OF_STEPS = ("heavy_tail", "outlier", "subnormal")


def _step(optimizer: str, operator: str) -> Model:
    words = optimizer.replace("_", ", ")
    return operator_model(
        f"step_{optimizer}",
        f"steps of {words} on a weight and a bias",
        "Scaled",
        lambda spec: (spec.k,),
        operator,
        values=_OF_STEPS,
        relations=of_steps(),
        fixed={"optimizer": optimizer, "grad_mode": "train"},
        device="cpu" if optimizer == "adagrad_fused" else "",
    )


STEPS = tuple(_step(optimizer, operator) for optimizer, operator in _STEPS.items())


def _low_bit(optimizer: str, title: str, **more: Any) -> Model:
    """A model for a step of torchao's low-bit optimizers, which store the moments of a parameter in
    few bits if it has at least 4,096 elements, in whole blocks of 256."""

    def table(spec: Any) -> Arguments:
        whole = 256 // math.gcd(256, spec.k)
        rows = max(spec.n, -(-4096 // spec.k))
        return -(-rows // whole) * whole, spec.k

    return operator_model(
        f"step_{optimizer}",
        f"steps of {title} on a table of rows",
        "Lookup",
        table,
        "low_bit_adam_step",
        takes_ids=True,
        columns="ids",
        values=_OF_STEPS,
        fixed={"optimizer": optimizer, "grad_mode": "train"},
        **more,
    )


LOW_BIT = (
    _low_bit("adamw_8bit", "adamw, 8bit"),
    _low_bit("adamw_4bit", "adamw, 4bit"),
    _low_bit("adamw_fp8", "adamw, fp8"),
    _low_bit("adamw_8bit_rounded", "adamw, 8bit, rounded by chance in bf16", random=True),
) * has("optim/adam.py", of="torchao")

#: Steps of Muon, which accepts only parameters of two dimensions.
MUONS = tuple(
    operator_model(
        f"step_{optimizer}",
        f"steps of {title} on a table of rows",
        "Lookup",
        lambda spec: (spec.n, spec.k),
        "muon_step",
        takes_ids=True,
        relations=of_steps_on_a_table(),
        columns="ids",
        values=_OF_STEPS,
        fixed={"optimizer": optimizer, "grad_mode": "train"},
    )
    for optimizer, title in (("muon", "muon"), ("muon_plain", "muon without Nesterov's momentum"))
) * has("optim/_muon.py")
