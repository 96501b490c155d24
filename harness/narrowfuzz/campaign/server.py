"""The process that workers are forked from: it imports torch once, in seconds, for all of them."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
from multiprocessing import forkserver

from narrowfuzz.machine.device import forks
from narrowfuzz.machine.environment import prepare


def start_early(device: str, plant: str) -> None:
    """Start it while a command that will need it imports torch itself, which takes as long. A GPU
    is chosen first, and a process that has torch already has nothing to do meanwhile."""
    if "torch" not in sys.modules and forks(device):
        prepare(plant)
        start_server(device)


def start_server(device: str) -> None:
    """Start the process that workers on the device are forked from; it imports torch once."""
    modules = ["preload", "worker", *(["preload_torchao"] if forks(device) else [])]
    mp.get_context("forkserver").set_forkserver_preload(
        [f"narrowfuzz.campaign.{name}" for name in modules]
    )
    quieten_tracker()
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is ours alone
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, usual)


def quieten_tracker() -> None:
    """The process that cleans up after workers that are ended warns of what it cleans up."""
    quiet = "ignore:resource_tracker:UserWarning"
    given = os.environ.get("PYTHONWARNINGS", "")
    if quiet not in given.split(","):
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (given, quiet)))
