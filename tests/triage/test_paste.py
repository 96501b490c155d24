"""Source as text: constants are put in, what they decide is gone, what is used comes along."""

from __future__ import annotations

import ast
from types import ModuleType

import pytest
from narrowfuzz.play import checkpoint, converted, layers, player
from narrowfuzz.play.job import Job, Taps
from narrowfuzz.triage.script import paste
from narrowfuzz.triage.script.job import fields_as_text
from narrowfuzz.triage.script.paste import hoisted, pasted, undefined_in

SOURCE = '''
LIMIT = 3

def helper(x: int) -> int:
    """One line goes, too."""
    return x + LIMIT

def unused(x):
    return x

def entry(x: int, *, mode: str = "a", times: int = 1, tap=None) -> int:
    """Two lines
    go."""
    y: int = x
    if mode == "b" and x:
        y = helper(y)
    if tap is not None:
        y = tap(y)
    if times > 1 or x:
        y = y * times
    return y if mode != "a" else helper(y)
'''


def text_of(monkeypatch: pytest.MonkeyPatch, **constants: str) -> str:
    monkeypatch.setattr(paste.inspect, "getsource", lambda module: SOURCE)
    return pasted(("entry",), (ModuleType("source"),), {"mode": "'a'", **constants})


def test_branches_that_are_never_taken_go(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(monkeypatch)
    assert "unused" not in text and "tap" not in text and "Two lines" not in text
    assert "LIMIT = 3" in text and "One line" not in text
    assert text.count("if ") == 1 and "if x:" in text, text
    space: dict[str, object] = {}
    exec(text, space)
    assert space["entry"](2) == 5  # type: ignore[operator]


def test_what_the_script_defines_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(monkeypatch, tap="mine", times="4", mode="'b'")
    assert "y = mine(y)" in text and "if x:" in text and "helper" in text
    space: dict[str, object] = {"mine": lambda y: -y}
    exec(text, space)
    assert space["entry"](2) == -20  # type: ignore[operator]


def test_nothing_is_annotated_but_the_fields_of_dataclasses() -> None:
    events = (("forward", 0, 0, "train", False), ("backward", 0, (0,), False))
    job = Job(events, "float32", "cpu", (2, 3), (2, 3))
    constants = (
        fields_as_text("job", job)
        | fields_as_text("taps", Taps())
        | {"job": "None", "taps": "None"}
    )
    text = pasted(("play", "Trace"), (layers, checkpoint, player, converted), constants)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.returns is None and not any(a.annotation for a in node.args.args)
    assert "LayerWatch" not in text and "recomputing" not in text and "torch.optim" not in text
    assert len(hoisted(text).splitlines()) < 95


def test_a_name_that_does_not_exist_is_refused() -> None:
    with pytest.raises(KeyError):
        pasted(("nothing",), (player,))


def test_an_argument_of_the_same_name_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        SOURCE
        + """
def other(mode, *, times):
    return mode * times
def second(*, mode="a", times=2):
    return other(3, times=times) + len(mode)
"""
    )
    monkeypatch.setattr(paste.inspect, "getsource", lambda module: source)
    text = pasted(("second",), (ModuleType("source"),), {"mode": "'a'", "times": "2"})
    space: dict[str, object] = {}
    exec(text, space)
    assert space["second"]() == 7 and "def other(mode):" in text  # type: ignore[operator]


def test_what_stays_open_is_still_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paste.inspect, "getsource", lambda module: SOURCE)
    text = pasted(("entry",), (ModuleType("source"),), {"mode": "'a'"}, ("times",))
    assert "def entry(x, *, times=1):" in text and "mode" not in text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(m, *, mode='a'):\n    return 1 if 0 < m < 16 else 2", 2),
        ("def f(m, *, mode='a'):\n    for _ in 'x':\n        if mode == 'b':\n            m = 0\n"
         "    return m", 64),
        ("def f(m, *, mode='a'):\n    def g(x, *, mode='own'):\n        return mode\n"
         "    return g(m, mode='mine')", "mine"),
    ],
)  # fmt: skip
def test_what_is_pasted_means_what_it_meant(
    monkeypatch: pytest.MonkeyPatch, source: str, expected: object
) -> None:
    monkeypatch.setattr(paste.inspect, "getsource", lambda module: source)
    space: dict[str, object] = {}
    exec(pasted(("f",), (ModuleType("source"),), {"mode": "'a'"}), space)
    assert space["f"](64) == expected  # type: ignore[operator]


@pytest.mark.parametrize(
    "source",
    [
        "def f(m, *, mode='a'):\n    mode = mode.upper()\n    return mode",
        "def f(m, *, mode='a'):\n    return [mode for mode in m]",
        "def f(m, *, mode='a'):\n    return lambda mode: mode",
        "def g(m, *, mode):\n    return mode\ndef f(m, *, mode='a'):\n    return g(m, mode='b')",
    ],
)
def test_what_would_mean_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(paste.inspect, "getsource", lambda module: source)
    with pytest.raises(ValueError, match="put in"):
        pasted(("f",), (ModuleType("source"),), {"mode": "'a'"})


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("def f(x):\n    return [SCALE * y for y in x]\nf([1])\n", ["SCALE"]),
        ("SCALE = 2.0\ndef f(x):\n    def g(y): return SCALE * y\n    return g(x)\n", []),
        ("import math\nclass A:\n    x: Unknown = math.pi\n    y = lost\n", ["lost"]),
        ("def f():\n    global late\n    late = 1\nf()\nprint(late, __file__)\n", []),
        ("try:\n    x = 1\nexcept ValueError as error:\n    print(error)\nprint(x, y)\n", ["y"]),
    ],
)
def test_a_name_that_nobody_defines_is_found(text: str, missing: list[str]) -> None:
    assert undefined_in(f"from __future__ import annotations\n{text}") == missing
