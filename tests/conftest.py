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


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """What torch has for the thread or for all stays as it is: compiled code asks for it at each
    call, and would be compiled again in a test that has nothing to do with it."""
    before = _of_torch()
    yield
    changed = {name: value for name, value in _of_torch().items() if before[name] != value}
    assert not changed, f"{changed}, before { ({name: before[name] for name in changed}) }"


def _of_torch() -> dict[str, object]:
    import torch
    from torch._dynamo import eval_frame
    from torch.utils import _python_dispatch as modes

    inside = torch._C
    return {
        "in a dispatch mode": modes.is_in_torch_dispatch_mode(),
        "in a mode that compiles": modes.is_in_any_mode_without_ignore_compile_internals(),
        "dispatch keys included": str(inside._dispatch_tls_local_include_set()),
        "dispatch keys excluded": str(inside._dispatch_tls_local_exclude_set()),
        "dispatch modes": inside._len_torch_dispatch_stack(),
        "function modes": inside._len_torch_function_stack(),
        "functions are overridden": inside._is_torch_function_enabled(),
        "no function is overridden": inside._is_torch_function_all_disabled(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast's dtype": torch.get_autocast_dtype("cpu"),
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic, or warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "stance of the compiler": eval_frame._stance.stance,
        "threads": torch.get_num_threads(),
        "oneDNN": torch.backends.mkldnn.enabled,
    }
