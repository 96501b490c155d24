"""Scales and histories are what the recipe's rules make of what was seen, however training goes."""

from __future__ import annotations

from narrowfuzz.plugin import Harness

RULES = ("O14", "O13", "O12", "O19", "O20", "O2", "O3", "O1", "R20", "contract")


def test_schedules(harness: Harness) -> None:
    harness.check_schedules(RULES)


def test_schedules_in_a_process_of_their_own(harness: Harness) -> None:
    """Libraries that have to be patched to run here; a short campaign."""
    harness.check_patched()
