"""A user's own model that cannot be judged is refused in a sentence that says why."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from narrowfuzz.own_models import register
from narrowfuzz.own_models.calls import observe_call
from test_own_models import EVERY_SECOND, Own, own
from torch import nn

__all__ = ["own"]  # a fixture


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise RuntimeError('no weights here')", "importing it raised RuntimeError: no weights"),
        ("import nothing_like_it", "importing it raised ModuleNotFoundError"),
        ("import nothing_like_it.at_all", "install nothing_like_it where narrowfuzz runs"),
        ("import torch.nothing_like_it", "it'; there is a torch, but it is another release"),
        ("def other(): pass", "there is no function build in it"),
        ("def build(dim): pass", "build needs dim: give it a default, or values by Literal"),
        ("def build(): raise OSError('no such checkpoint')", "build() raised OSError: no such"),
        ("def build(): import sys; sys.exit(3)", "build() raised SystemExit"),
        ("def build(): pass", "build() gives nothing; it must return a module and"),
        ("def build(): return nn.Linear(4, 4)", "build() gives a Linear; it must return a module"),
        ("def build(): return nn.Linear(4, 4), 'x'", "gives no tensor to call the model with"),
        (
            "def build(): return nn.Linear(4, 4), ((torch.ones(2, 4),), {})",
            "gives its tensors inside of other tuples, lists or dicts, as ((args), {kwargs}) does; "
            "it must return a module and the arguments of a call: a tensor, a tuple of arguments, "
            "or a dict of arguments by name",
        ),
        (
            "def build(): return nn.Linear(4, 4), ([[torch.ones(2, 4)], [torch.ones(3, 4)]],)",
            "gives its tensors inside of other tuples, lists or dicts",
        ),
        ("def build(): return nn.Conv1d(3, 3, 1), torch.ones(2, 3, 4)", "it has no nn.Linear"),
        ("def build(): return nn.Linear(4, 4), torch.ones(2, 5)", "raised RuntimeError: "),
        ("def build(): return nn.Linear(4, 4, device='meta'), torch.ones(2, 4)", "built on meta"),
        (
            "def build(): return nn.Sequential(nn.LazyLinear(4)), torch.ones(2, 4)",
            "0.weight gets its shape in the first forward, as in nn.LazyLinear: call the model",
        ),
        (
            "def build(): return torch.jit.script(nn.Linear(4, 4)), torch.ones(2, 4)",
            "the model itself is compiled by torch.jit",
        ),
        (
            "def build():\n"
            "    within = torch.jit.script(nn.Sequential(nn.Linear(4, 4)))\n"
            "    return nn.Sequential(nn.Linear(4, 4), within), torch.ones(2, 4)",
            "1 is compiled by torch.jit: it takes no hooks",
        ),
        ("def build(): return nn.Linear(4, 4), torch.ones(0, 4)", "it needs rows and features"),
        ("def build(): return nn.Linear(1, 1), torch.ones(2**20 + 1, 1)", "it has 1048577 rows"),
        (
            """
class Detached(nn.Linear):
    def forward(self, x):
        return super().forward(x).detach()
def build(): return Detached(4, 4), torch.ones(2, 4)
""",
            "nothing that it returns has a gradient",
        ),
        (
            """
class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
    def forward(self, x):
        with torch.enable_grad():
            self.optimizer.zero_grad()
            self.net(x).square().mean().backward()
            self.optimizer.step()
        return self.net(x)
def build(): return Steps(), torch.ones(2, 4)
""",
            "its forward makes a training step of its own: it differentiates, and changes net.weig",
        ),
        (
            """
class Counted(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
    def forward(self, x):
        if not hasattr(self, "count"):
            self.register_buffer("count", torch.zeros(()))
        self.count += 1
        return super().forward(x)
def build(): return Counted(), torch.ones(2, 4)
""",
            "each forward changes its buffer count, which the first one makes: create it where the "
            "model is built",
        ),
        (
            """
class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        import os
        self.register_buffer("noise", torch.tensor(list(os.urandom(8))))
    def forward(self, x):
        return self.proj(x)
def build(): return Noisy(), torch.ones(2, 4)
""",
            "gives other buffers each time",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_refused_in_a_sentence(own: Own, source: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"^model mine\.py:build: ") as caught:
        register(own(source))
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("llama.py", "write FILE.py:build or package.module:build"),
        ("no_such_file.py:build", "there is no file no_such_file.py"),
        ("no.such.module:build", "No module named 'no'"),
        ("nosuchmodule:build", "there is no module nosuchmodule"),
    ],
)
def test_what_does_not_exist_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match="model") as caught:
        register(text)
    assert says in str(caught.value)


def test_a_misspelt_name_is_answered_with_what_is_there(
    own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = own("def _sizes(): pass\ndef build(): pass\ndef block(): pass\n")
    file = text.rpartition(":")[0]
    with pytest.raises(ValueError, match=r"did you mean 'build'. Its functions are build, block$"):
        register(f"{file}:bild")
    with pytest.raises(ValueError, match=r"no function xyz in it; its functions are build, block$"):
        register(f"{file}:xyz")
    near = str(Path(file).with_name("mina.py"))
    with pytest.raises(ValueError, match=rf"did you mean '{re.escape(file)}'"):
        register(f"{near}:build")
    package = tmp_path / "my_models"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "llama.py").write_text("def build(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    for wrong in ("my_models.lama", "my_model.llama"):
        with pytest.raises(ValueError, match=r"did you mean 'my_models(\.llama)?'"):
            register(f"{wrong}:build")


REPEATS = {
    "a clock": "x * (1 + time.perf_counter_ns() % 1000 * 2.0**-12)",
    "a list that grows": "x * (1 + 0.125 * kept(self))",
    "a generator of its own": "x + torch.rand(x.shape, generator=GENERATOR)",
    "numpy's fresh generator": "x * float(np.random.default_rng().random())",
}


@pytest.mark.parametrize("every", [2, 3])
def test_a_forward_that_differs_is_refused_by_the_name_of_its_module(own: Own, every: int) -> None:
    with pytest.raises(ValueError, match=r"^model mine\.py:build: ") as caught:
        register(own(EVERY_SECOND.format(every=every)))
    assert "another output is blocks.1 (EverySecond), and" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("formula", REPEATS.values(), ids=REPEATS)
def test_what_is_kept_or_read_from_outside_is_refused(own: Own, formula: str) -> None:
    text = f"""
import time, numpy as np
GENERATOR = torch.Generator()
def kept(module):
    module.list = [*getattr(module, "list", []), 1]
    return len(module.list)
class Own(nn.Module):
    def forward(self, x):
        return {formula}
def build(): return nn.Sequential(nn.Linear(8, 8), Own(), nn.Linear(8, 8)), torch.ones(4, 8)
"""
    with pytest.raises(ValueError, match=r"another output is 1 \(Own\), and"):
        register(own(text))


@pytest.mark.parametrize("draw", ["random.random()", "float(np.random.rand())"])
def test_random_numbers_of_another_generator_are_refused_where_they_matter(
    own: Own, draw: str
) -> None:
    text = f"""
import random, numpy as np
class Dropped(nn.Module):
    def forward(self, x):
        return x if {draw} < 0.5 else 0 * x
def build(): return nn.Sequential(nn.Linear(8, 8), Dropped()), torch.ones(4, 8)
"""
    with pytest.raises(ValueError, match=r"cannot be repeated: 1 \(Dropped\) draws from"):
        register(own(text))
    # as some models do that could drop a layer, and are told not to
    (model,) = register(own(text.replace("< 0.5", "< 2"), name="never.py"))
    assert not model.random


def test_memory_that_nobody_wrote_is_refused_and_what_is_written_is_not(own: Own) -> None:
    text = """
class Halves(nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        y[..., :ROWS] = x[..., :ROWS]
        return y
def build(): return nn.Sequential(nn.Linear(8, 8), Halves(), nn.GELU()), torch.ones(4, 8)
"""
    with pytest.raises(
        ValueError, match=r"uninitialised memory: the output of 1 \(Halves\) is NaN"
    ):
        register(own(text.replace("ROWS", "7")))
    assert not register(own(text.replace("ROWS", "8"), name="whole.py"))[0].random


def test_whether_it_draws_is_read_from_the_generator(own: Own) -> None:
    """With stochastic depth of 0.01 four outputs are mostly equal."""
    text = """
class Depth(nn.Module):
    def forward(self, x):
        return x if torch.rand(()) > 0.01 else 0 * x
def build(): return nn.Sequential(nn.Linear(8, 8), Depth()), torch.ones(4, 8)
"""
    assert register(own(text))[0].random


def test_generators_are_left_as_they_were(own: Own) -> None:
    import random

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    threads = torch.get_num_threads()
    text = "def build(): return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.ones(4, 8)"
    answer = observe_call(nn.Dropout(0.5), lambda: torch.rand(3))
    register(own(text))
    assert answer.moved == ["torch"] and torch.get_num_threads() == threads
    assert [random.random(), np.random.rand()] == drawn[:2]


def test_what_a_backward_leaves_behind_is_seen_by_the_next_forward(own: Own) -> None:
    text = """
class Ages(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.age = nn.Linear(8, 8), 0
    def forward(self, x):
        y = self.proj(x) * (1 + 0.125 * self.age)
        y.register_hook(lambda grad: setattr(self, "age", 1))
        return y
def build(): return nn.Sequential(nn.Linear(8, 8), Ages()), torch.ones(4, 8)
"""
    with pytest.raises(ValueError, match=r"another output is 1 \(Ages\), and"):
        register(own(text))


@pytest.mark.parametrize(
    ("signature", "says"),
    [
        ("dim: int", "build needs dim: give it a default, or values by Literal"),
        ("dim: 'NoSuchType' = 4", "build has an annotation that does not exist"),
        ("dim: Literal[4, 5] = 4", "(dim=5): build() raised RuntimeError: five"),
    ],
)
def test_parameters_that_cannot_be_drawn_are_refused(own: Own, signature: str, says: str) -> None:
    text = f"""
from typing import Literal
def build({signature}):
    if dim == 5: raise RuntimeError("five")
    return nn.Linear(dim, 4), torch.ones(3, dim)
"""
    with pytest.raises(ValueError, match=r"^model mine\.py:build") as caught:
        register(own(text))
    assert says in str(caught.value)


HOOKED = """
class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.calls = nn.Linear(4, 4), 0
        self.register_buffer("means", torch.zeros(4))
        self.up.weight.register_hook(lambda gradient: self.means.add_({moved}))
    def forward(self, x):
        self.calls += {counted}
        return self.up(x) + self.means + self.calls % 2
def build(): return Hooked(), torch.ones(2, 4)
"""


@pytest.mark.parametrize(
    ("moved", "counted", "says"),
    [
        (1.0, 0, "its backward changes its buffer means, as a hook does, and a forward after"),
        (0.0, 1, "gives another output each time: the first module"),
        (1.0, 1, "gives another output each time: the first module"),  # also without it
    ],
)
def test_a_buffer_that_a_backward_changes_is_named_where_outputs_differ_for_it(
    own: Own, moved: float, counted: int, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        register(own(HOOKED.format(moved=moved, counted=counted)))


def test_a_buffer_that_a_backward_changes_and_nothing_reads_is_no_reason_to_refuse(
    own: Own,
) -> None:
    text = HOOKED.format(moved="1.0", counted=0).replace(" + self.means", "")
    (model,) = register(own(text))
    assert model.linears
