"""``reference.delayed`` in a stand-alone script."""

from __future__ import annotations

from harness.case import Spec
from harness.stateful import ScheduleScript


def script(spec: Spec) -> ScheduleScript:
    """Imports our own layer: a finding here is a fault planted in it."""
    return ScheduleScript(imports="from harness.models import delayed", verbs="")
