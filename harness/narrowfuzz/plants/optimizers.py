"""Faults in the steps of torch's optimizers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from narrowfuzz.plants.operators import of_operator
from narrowfuzz.plants.patching import attribute_replaced

#: ``change(run, params, *lists, **options)`` replaces torch's functional step ``run``.
Change = Callable[..., Any]


def _stepping(name: str, change: Change) -> AbstractContextManager[None]:
    """``change`` replaces ``torch.optim.<name>.<name>``, which dispatches to all implementations:
    loop, foreach and fused."""
    return attribute_replaced(
        importlib.import_module(f"torch.optim.{name}"), name, partial(partial, change)
    )


def _correction_lags(run: Any, *lists: Any, **options: Any) -> None:
    """From the second step on, the bias correction of both moments uses the number of the step
    before."""
    later = [step for step in lists[5] if step.item() > 0]
    for step in later:
        step -= 1
    run(*lists, **options)
    for step in later:
        step += 1


def _narrow_keeps(run: Any, params: Any, *lists: Any, **options: Any) -> None:
    """Parameters in bf16 and fp16 get no weight decay."""
    import torch

    narrow = params and params[0].dtype != torch.float32
    decay = 0.0 if narrow else options["weight_decay"]
    run(params, *lists, **{**options, "weight_decay": decay})


def _one_waits(run: Any, *lists: Any, **options: Any) -> None:
    """If several parameters are updated at once (foreach, fused), the last one is not."""
    if (options.get("foreach") or options.get("fused")) and len(lists[0]) > 1:
        lists = tuple(one[:-1] for one in lists)
    run(*lists, **options)


def _with(**changed: Any) -> Change:
    """A step with some options replaced."""
    return lambda run, *lists, **options: run(*lists, **{**options, **changed})


def _betas_exchanged(run: Any, *lists: Any, **options: Any) -> None:
    run(*lists, **{**options, "beta1": options["beta2"], "beta2": options["beta1"]})


def _rate_decays_early(run: Any, *lists: Any, **options: Any) -> None:
    """Each step uses the learning rate of the step after it."""
    for step in lists[3]:
        step += 1
    run(*lists, **options)
    for step in lists[3]:
        step -= 1


def _decays_apart(run: Any, params: Any, *lists: Any, **options: Any) -> None:
    """Weight decay is decoupled from the gradient, as in AdamW."""
    for parameter in params:
        parameter.mul_(1.0 - options["lr"] * options["weight_decay"])
    run(params, *lists, **{**options, "weight_decay": 0.0})


def _muon(name: str, change: Change) -> AbstractContextManager[None]:
    """``change`` replaces the function ``name`` of torch's Muon, whose only implementation is a
    loop."""
    return attribute_replaced(
        importlib.import_module("torch.optim._muon"), name, lambda run: partial(change, run)
    )


def _as_it_is(run: Any, grad: Any, *args: Any) -> Any:
    """The momentum itself, without the Newton-Schulz iteration."""
    return grad.bfloat16()


def _transposed(run: Any, lr: float, how: Any, shape: Any) -> float:
    """The learning rate of the transposed matrix's shape."""
    return run(lr, how, (shape[1], shape[0]))  # type: ignore[no-any-return]


_plant = partial(of_operator, needs="optimizer steps")

PLANTS = [
    _plant(
        "adam-correction-lags",
        "optimizer",
        "Adam corrects its moments by the step before",
        "the class of steps that are counted at another time",
        plant=lambda: _stepping("adam", _correction_lags),
        operator="adam_step",
    ),
    _plant(
        "adamw-decay-in-gradient",
        "optimizer",
        "AdamW's decay is part of the gradient",
        "https://arxiv.org/abs/1711.05101",
        plant=lambda: _stepping("adam", _with(decoupled_weight_decay=False)),
        operator="adam_step",
    ),
    _plant(
        "adam-betas-exchanged",
        "optimizer",
        "Adam's betas stand in each other's place",
        "the class of arguments that are handed on by position",
        plant=lambda: _stepping("adam", _betas_exchanged),
        operator="adam_step",
    ),
    _plant(
        "adam-epsilon-of-fp16",
        "optimizer",
        "Adam's epsilon is 1e-4, whatever was asked for",
        "the class of defaults for fp16 that fp32 trainings get, too",
        plant=lambda: _stepping("adam", _with(eps=1e-4)),
        operator="adam_step",
    ),
    _plant(
        "sgd-decay-lost-in-narrow-dtypes",
        "optimizer",
        "bf16 and fp16 parameters do not decay under SGD",
        "https://github.com/Nerogar/OneTrainer/issues/996",
        plant=lambda: _stepping("sgd", _narrow_keeps),
        operator="sgd_step",
    ),
    _plant(
        "sgd-dampening-ignored",
        "optimizer",
        "SGD with momentum is not dampened",
        "the class of options that one implementation leaves out",
        plant=lambda: _stepping("sgd", _with(dampening=0.0)),
        operator="sgd_step",
    ),
    _plant(
        "fused-step-leaves-last-parameter",
        "optimizer",
        "of parameters that are stepped at once the last stays as it is",
        "https://github.com/pytorch/pytorch/issues/191763",
        plant=lambda: _stepping("adam", _one_waits),
        operator="adam_step",
    ),
    _plant(
        "adagrad-rate-decays-early",
        "optimizer",
        "Adagrad's rate is that of the next step",
        "the class of steps that are counted at another time",
        plant=lambda: _stepping("adagrad", _rate_decays_early),
        operator="adagrad_step",
    ),
    _plant(
        "adagrad-decay-apart",
        "optimizer",
        "under Adagrad parameters decay by themselves, and not by their gradients",
        "https://arxiv.org/abs/1711.05101",
        plant=lambda: _stepping("adagrad", _decays_apart),
        operator="adagrad_step",
    ),
    _plant(
        "muon-without-iteration",
        "optimizer",
        "Muon steps by its momentum as it is",
        "https://github.com/deepspeedai/DeepSpeed/issues/8442",
        plant=lambda: _muon("_zeropower_via_newtonschulz", _as_it_is),
        operator="muon_step",
    ),
    _plant(
        "muon-rate-of-transposed",
        "optimizer",
        "Muon's rate is adjusted for rows and columns in each other's place",
        "the class of arguments that are handed on by position",
        plant=lambda: _muon("_adjust_lr", _transposed),
        operator="muon_step",
    ),
]
