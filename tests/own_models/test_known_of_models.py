"""What is found out about a user's model, so that known issues that it cannot show are not
listed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from narrowfuzz.own_models import register

HEAD = "import torch, torch.nn.functional as F\nfrom torch import nn\n"
Own = Callable[..., str]


@pytest.fixture
def own(tmp_path: Path) -> Own:
    def write(source: str) -> str:
        (tmp_path / "mine.py").write_text(HEAD + source)
        return f"{tmp_path / 'mine.py'}:build"

    return write


@pytest.mark.parametrize(
    ("layer", "derived"),
    [
        ("nn.Linear(8, 8)", False),
        ("nn.MultiheadAttention(8, 2)", False),  # torch's own subclass, which changes nothing
        ("torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))", False),
        ("Own(8, 8)", True),
        ("torch.nn.utils.parametrizations.weight_norm(Own(8, 8))", True),
    ],
)
def test_classes_derived_from_linear_are_known(own: Own, layer: str, derived: bool) -> None:
    source = (
        "class Own(nn.Linear): pass\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        f"        super().__init__(); self.first, self.second = nn.Linear(8, 8), {layer}\n"
        "    def forward(self, x):\n"
        "        y, *given = self.first(x), *[x] * 2 * isinstance(self.second, "
        "nn.MultiheadAttention)\n"
        "        y = self.second(y, *given)\n"
        "        return y[0] if given else y\n"
        "def build(): return Model(), torch.ones(4, 8)\n"
    )
    modules = register(own(source))[0].modules
    assert modules is not None and "Linear" in modules
    assert ("subclass of Linear" in modules) is derived
