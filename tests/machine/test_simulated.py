"""The simulated Hopper: a GPU whose FP8 accumulator is not fp32, on any machine."""

from __future__ import annotations

import pytest
from fresh import HERE, python
from narrowfuzz.machine.device import DEVICES, check_device, enter

CHECKS = HERE / "simulated_checks.py"


@pytest.mark.heavy  # two minutes of one core
def test_every_check_of_the_simulated_device_holds() -> None:
    done = python(CHECKS, seconds=300)
    assert done.stdout.count("holds") == CHECKS.read_text().count("def check_")


def test_a_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        ValueError, match="must be one of cpu, cuda, simulated or cuda:N, got 'tpu'"
    ):
        check_device("tpu")


def test_a_device_that_is_not_here_is_refused() -> None:
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="--device cuda: "):
            check_device("cuda")


def test_the_cpu_is_always_here() -> None:
    check_device("cpu")
    assert enter("cpu").torch == "cpu" and DEVICES[0] == "cpu"
