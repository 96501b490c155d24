"""The process that workers are forked from: it imports torch once, in seconds, for all of them."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
from multiprocessing import forkserver
from multiprocessing.connection import Connection

from narrowfuzz.campaign.config import Config, Place
from narrowfuzz.machine.device import forks
from narrowfuzz.machine.environment import prepare


def start_early(device: str, plant: str) -> None:
    """Start the server while the command itself imports torch, which takes as long. Not for GPUs,
    one of which must be chosen first, and not if torch is imported already: then there is nothing
    to do in the meantime."""
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
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is for this process
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, usual)


def work(config: Config, place: Place, out: Connection) -> None:
    """The entry point of a worker's process: the supervisor itself needs no compiler."""
    from narrowfuzz.campaign.worker import work

    work(config, place, out)


def quieten_tracker() -> None:
    """Silence multiprocessing's resource tracker, which warns of what it cleans up after workers
    that were killed."""
    quiet = "ignore:resource_tracker:UserWarning"
    given = os.environ.get("PYTHONWARNINGS", "")
    if quiet not in given.split(","):
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (given, quiet)))
