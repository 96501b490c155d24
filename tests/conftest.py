"""What several test files share."""

from __future__ import annotations

import gc
import logging
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from narrowfuzz.machine.environment import prepare, settle
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.triage.forked import ForkedScripts
from narrowfuzz.triage.verify import RunScript

prepare()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Where tests run, torch is as it is in a worker; who hands them out needs none."""
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", 0):
        settle()


def pytest_collection_finish() -> None:
    gc.freeze()  # what tests have imported lives as long as the process
    gc.set_threshold(20_000)  # torch's graphs are objects by the thousand, and few are in cycles


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is marked ``one_in(n)`` the first of every n rows is tried each time; others
    are ``heavy``, as rows that are so already."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is None or item.get_closest_marker("heavy"):
            continue
        test = item.nodeid.partition("[")[0]
        if seen[test] % mark.args[0]:
            item.add_marker("heavy")
        seen[test] += 1


@pytest.fixture(scope="session", autouse=True)
def scripts() -> RunScript:
    """Runs scripts in copies of this process as it is before the first test: most of a fresh
    interpreter's time goes into importing torch and torchao. What tests ``run_script`` itself, a
    campaign or code generation has fresh ones."""
    return ForkedScripts()


@pytest.fixture(autouse=True)
def logs() -> Iterator[None]:
    """Such a script silences what libraries log: not for good."""
    before = logging.root.manager.disable
    yield
    logging.disable(before)


@pytest.fixture(autouse=True)
def excepthook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that a test runs in its own process changes how that one ends: not for good."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


@pytest.fixture(autouse=True)
def forgets_own_models() -> Iterator[None]:
    """A user's model that a test registers is none of the next test's, nor is the folder that it
    was imported from: whoever asks for a version looks through all of ``sys.path``."""
    before, paths = set(MODELS), [*sys.path]
    yield
    sys.path[:] = paths
    if before == MODELS.keys():
        return
    from narrowfuzz.own_models import register
    from narrowfuzz.play.own import imported

    for name in MODELS.keys() - before:
        del MODELS[name]
    register.cache_clear()
    imported.cache_clear()
