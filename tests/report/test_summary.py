"""The last lines of a run on a user's model: which linears were checked one by one, and why others
were not."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import pytest
from narrowfuzz.own_models import register
from narrowfuzz.report.judged import Judged
from narrowfuzz.report.store import Store
from narrowfuzz.report.summary import _print_layers
from rich.console import Console
from test_accepted import of

SOURCE = """
import torch, torch.nn.functional as F
from torch import nn
class Gated(nn.Linear):
    def forward(self, x): return torch.sigmoid(super().forward(x)) * x
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.up = nn.MultiheadAttention(8, 2), nn.Linear(8, 8)
        self.gate, self.spare = Gated(8, 8), nn.Linear(8, 8)
    def forward(self, x): return self.gate(self.up(self.attention(x, x, x)[0]))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
        self.heads = nn.ModuleDict({name: nn.Linear(8, 8) for name in "abcdef"})
    def forward(self, x): return sum(head(self.blocks[0](x)) for head in self.heads.values())
def build(): return Model(), torch.randn(16, 8)
"""
UP, HEADS = {"model.blocks.0.up"}, {f"model.heads.{name}" for name in "abcdef"}
NEVER = (
    "; never called, other functions read the parameters: blocks.0.attention.out_proj"
    "; with a forward of its own: blocks.0.gate"
    "; not called with what the model is built with: blocks.0.spare"
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("arm", "seen", "says"),
    [
        ("eager", UP | HEADS, f"eager: 7 of 10 linears checked one by one{NEVER}"),
        ("eager", HEADS, "; not one by one: blocks.0.up; with a forward"),
        (
            "eager+checkpoint",
            UP,
            f"eager, with checkpointing: 1 of 10 linears checked one by one{NEVER}"
            "; not recomputed: heads.a, heads.b, heads.c, heads.d and 2 more",
        ),
        (
            "aot_eager+checkpoint",
            HEADS,
            "6 of 10 linears checked one by one; never called, other functions read the "
            "parameters: blocks.0.attention.out_proj; inside of compiled code: blocks.0.up, "
            "blocks.0.gate; not called with what the model is built with: blocks.0.spare",
        ),
    ],
)
def test_why_linears_were_not_checked_one_by_one_is_said(
    tmp_path: Path, arm: str, seen: set[str], says: str
) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    (model,) = register(f"{tmp_path / 'mine.py'}:build")
    one = "torch.fp32", arm, model.name
    console = Console(file=io.StringIO(), width=1000)
    _print_layers(console, Judged(frozenset({one}), (), {one: frozenset(seen)}))
    assert isinstance(console.file, io.StringIO)
    assert says in console.file.getvalue()


def test_nothing_is_said_where_all_were_checked(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    (model,) = register(f"{tmp_path / 'mine.py'}:build")
    one = "torch.fp32", "eager", model.name
    console = Console(file=io.StringIO(), width=1000)
    _print_layers(console, Judged(frozenset({one}), (), {one: frozenset(model.linears)}))
    assert isinstance(console.file, io.StringIO)
    (line,) = console.file.getvalue().splitlines()
    assert line.endswith("eager: 10 of 10 linears checked one by one")


def test_a_filter_is_not_repeated(tmp_path: Path) -> None:
    """Its globs may fill lines, and the first line of a check has them."""
    (tmp_path / "mine.py").write_text(SOURCE)
    (model,) = register(f"{tmp_path / 'mine.py'}:build")
    one = "torchao.mxfp8.rceil@!up,!down", "eager", model.name
    share = Judged(frozenset({one}), (), {one: frozenset(model.linears)})
    console = Console(file=io.StringIO(), width=1000)
    _print_layers(console, share)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().startswith("  torchao.mxfp8.rceil (filtered), eager: 10 of 10")
    said = of(Store(tmp_path / "run"), Counter(), share=share, subject="mine.py:build").compared()
    assert said.startswith("Checked with torchao.mxfp8.rceil (filtered): 10 of 10 linears")
