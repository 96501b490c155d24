"""Optimizers of torch whose steps are wrong."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from narrowfuzz.models.catalog import of_kind
from narrowfuzz.plants.patching import replaced
from narrowfuzz.plants.plant import Plant

#: ``change(run, params, *lists, **options)`` in place of torch's functional step of that name.
Change = Callable[..., Any]


def _stepping(name: str, change: Change) -> AbstractContextManager[None]:
    """All implementations are chosen in ``torch.optim.adam.adam`` and ``torch.optim.sgd.sgd``."""
    return replaced(importlib.import_module(f"torch.optim.{name}"), name, partial(partial, change))


def _correction_lags(run: Any, *lists: Any, **options: Any) -> None:
    """Both moments are corrected by the step before, from the second step on."""
    later = [step for step in lists[5] if step.item() > 0]
    for step in later:
        step -= 1
    run(*lists, **options)
    for step in later:
        step += 1


def _narrow_keeps(run: Any, params: Any, *lists: Any, **options: Any) -> None:
    """Of bf16 and fp16 parameters the decay is lost."""
    import torch

    narrow = params and params[0].dtype != torch.float32
    decay = 0.0 if narrow else options["weight_decay"]
    run(params, *lists, **{**options, "weight_decay": decay})


def _one_waits(run: Any, *lists: Any, **options: Any) -> None:
    """Of several parameters that are stepped at once the last stays behind."""
    if (options.get("foreach") or options.get("fused")) and len(lists[0]) > 1:
        lists = tuple(one[:-1] for one in lists)
    run(*lists, **options)


def _with(**changed: Any) -> Change:
    """With other options."""
    return lambda run, *lists, **options: run(*lists, **{**options, **changed})


def _betas_exchanged(run: Any, *lists: Any, **options: Any) -> None:
    run(*lists, **{**options, "beta1": options["beta2"], "beta2": options["beta1"]})


#: An operator's fault is hunted among operators, as by ``run --operator '*'``.
_plant = partial(Plant, recipes=("torch.*",), needs="optimizer steps", models=of_kind("operator"))

PLANTS = [
    _plant(
        "adam-correction-lags",
        "optimizer",
        "Adam corrects its moments by the step before",
        "the class of steps that are counted at another time",
        plant=lambda: _stepping("adam", _correction_lags),
    ),
    _plant(
        "adamw-decay-in-gradient",
        "optimizer",
        "AdamW's decay is part of the gradient",
        "https://arxiv.org/abs/1711.05101",
        plant=lambda: _stepping("adam", _with(decoupled_weight_decay=False)),
    ),
    _plant(
        "adam-betas-exchanged",
        "optimizer",
        "Adam's betas stand in each other's place",
        "the class of arguments that are handed on by position",
        plant=lambda: _stepping("adam", _betas_exchanged),
    ),
    _plant(
        "adam-epsilon-of-fp16",
        "optimizer",
        "Adam's epsilon is 1e-4, whatever was asked for",
        "the class of defaults for fp16 that fp32 trainings get, too",
        plant=lambda: _stepping("adam", _with(eps=1e-4)),
    ),
    _plant(
        "sgd-decay-lost-in-narrow-dtypes",
        "optimizer",
        "bf16 and fp16 parameters do not decay under SGD",
        "https://github.com/Nerogar/OneTrainer/issues/996",
        plant=lambda: _stepping("sgd", _narrow_keeps),
    ),
    _plant(
        "sgd-dampening-ignored",
        "optimizer",
        "SGD with momentum is not dampened",
        "the class of options that one implementation leaves out",
        plant=lambda: _stepping("sgd", _with(dampening=0.0)),
    ),
    _plant(
        "fused-step-leaves-last-parameter",
        "optimizer",
        "of parameters that are stepped at once the last stays as it is",
        "https://github.com/pytorch/pytorch/issues/191763",
        plant=lambda: _stepping("adam", _one_waits),
    ),
]
