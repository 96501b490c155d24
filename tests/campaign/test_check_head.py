"""The first lines of a check: what they say of the model."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from narrowfuzz.campaign.check_head import Configuration, _compiling, _globs, head
from narrowfuzz.campaign.run_options import RunOptions
from narrowfuzz.case.spec import Spec
from narrowfuzz.draw.specs import fixed
from narrowfuzz.own_models import register
from narrowfuzz.recipe.recipe import named
from samples import every_recipe

MX = "torchao.mxfp8.rceil"
SOURCE = """
import torch
from torch import nn
def build(rows={rows}, out={out}):
    return nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, out)), torch.ones(rows, 48)
"""
IN = "0 (in_features must be a multiple of 32, the MX block, got 48)"
TOKENS = (
    "2 (tokens must be a multiple of 32, the MX block, got 31); with 256 tokens in the example it "
    "takes it"
)


@pytest.mark.parametrize(
    ("rows", "out", "only", "note"),
    [
        (32, 64, (), f"refuses 1 of 2 linears that it converts: {IN}; --filter '!0' leaves it as"),
        (32, 10, (), f"refuses 2 of 2 linears that it converts: {IN}, 2 (out_features must"),
        (31, 64, ("!0",), f"refuses 1 of 1 linear that it converts: {TOKENS}"),
        (32, 64, ("!0",), ""),
    ],
)
def test_linears_that_a_recipe_refuses_are_named(
    tmp_path: Path, rows: int, out: int, only: tuple[str, ...], note: str
) -> None:
    (tmp_path / "mine.py").write_text(SOURCE.format(rows=rows, out=out))
    (model,) = register(f"{tmp_path / 'mine.py'}:build")
    recipe = every_recipe()[MX]
    options = RunOptions(models=(model.name,), recipes=(MX,))
    one = Configuration(options, model, (), "none", "none", only, (MX,), [recipe])
    specs = [
        fixed(Spec(recipe=MX, backend=backend, model=model.name), recipe)
        for backend in ("linear", "wrapper")
    ]
    notes = [line for line in head(one, 10, specs).splitlines() if line.startswith("note: ")]
    assert len(notes) == bool(note)
    for line in notes:
        assert line.startswith(f"note: {MX} {note}"), line


SUBCLASS = """
import torch
from torch import nn
class Scaled(nn.Linear):
    def forward(self, x): return super().forward(x) * 0.5
def build():
    layers = {"q": nn.Linear(64, 64), "k": nn.Linear(64, {k}), "o": Scaled({k}, 40)}
    return nn.Sequential(__import__("collections").OrderedDict(layers)), torch.ones(32, 64)
"""
OUT = "o (out_features must be a multiple of 32, the MX block, got 40)"


@pytest.mark.parametrize(
    ("k", "backends", "notes"),
    [
        (64, ("linear",), []),
        (64, ("wrapper",), [f"refuses 1 of 3 linears that it converts: {OUT}; --filter '!o'"]),
        (
            64,
            ("linear", "wrapper"),
            [f"with backend wrapper refuses 1 of 3 linears that it converts: {OUT}; --filter '!o'"],
        ),
        (
            48,
            ("linear", "wrapper"),
            [
                "with backend linear refuses 1 of 2 linears that it converts: k (out_features",
                "with backend wrapper refuses 2 of 3 linears that it converts: k (out_features",
            ],
        ),
    ],
)
def test_a_linear_that_a_backend_does_not_convert_is_not_said_to_be_refused(
    tmp_path: Path, k: int, backends: tuple[str, ...], notes: list[str]
) -> None:
    """MXFP8Linear replaces no subclass of nn.Linear, quantize_ wraps its weight."""
    (tmp_path / "mine.py").write_text(SUBCLASS.replace("{k}", str(k)))
    (model,) = register(f"{tmp_path / 'mine.py'}:build")
    recipe = every_recipe()[MX]
    options = RunOptions(models=(model.name,), recipes=(MX,))
    one = Configuration(options, model, (), "none", "none", (), (MX,), [recipe])
    specs = [
        fixed(Spec(recipe=MX, backend=backend, model=model.name), recipe) for backend in backends
    ]
    said = [line for line in head(one, 10, specs).splitlines() if "refuses" in line]
    assert len(said) == len(notes)
    for line, note in zip(said, notes, strict=True):
        assert line.startswith(f"note: {MX} {note}"), line


@pytest.mark.parametrize(
    ("programs", "says"),
    [(1, "compiled 1 time in about 13 seconds"), (3, "compiled 3 times, each in about 13 seconds")],
)
def test_one_program_is_not_said_to_be_each(programs: int, says: str) -> None:
    assert _compiling("inductor", 1, programs, None) == says
    assert _compiling("inductor", 1, programs, 12.0).startswith(f"{says}: that may not fit")


TRANSPOSES = """
import torch
from torch import nn
class Transposes(nn.Linear):
    def forward(self, x): return {product}
def build():
    return nn.Sequential(nn.Linear(64, 64), Transposes(64, 64, bias=False)), torch.ones(32, 64)
"""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("recipe", "backends", "product", "note"),
    [
        (MX, ("wrapper",), "x @ self.weight.T", f"{MX} converts 1, but"),
        (MX, ("linear", "wrapper"), "x @ self.weight.T", f"{MX} with backend wrapper converts 1,"),
        (MX, ("wrapper",), "nn.functional.linear(x, self.weight) * 0.5", ""),
        (MX, ("wrapper",), "super().forward(x) @ self.weight.T", ""),
        (MX, ("wrapper",), "x + self.weight.sum()", ""),
        (MX, ("linear",), "x @ self.weight.T", ""),
        ("torchao.float8.rowwise", ("",), "x @ self.weight.T", ""),
        ("torch.fp32", ("",), "x @ self.weight.T", ""),
    ],
)
def test_linears_whose_own_forward_quantises_nothing_are_named(
    tmp_path: Path, recipe: str, backends: tuple[str, ...], product: str, note: str
) -> None:
    """quantize_ wraps a weight, but its transpose is an ordinary tensor. Rowwise replaces the
    forward, and ``linear`` converts no subclass."""
    (tmp_path / "mine.py").write_text(TRANSPOSES.format(product=product))
    (model,) = register(f"{tmp_path / 'mine.py'}:build")
    chosen = every_recipe()[recipe]
    options = RunOptions(models=(model.name,), recipes=(recipe,))
    one = Configuration(options, model, (), "none", "none", (), (recipe,), [chosen])
    specs = [
        fixed(Spec(recipe=recipe, backend=backend, model=model.name), chosen)
        for backend in backends
    ]
    said = [line for line in head(one, 10, specs).splitlines() if line.startswith("note: ")]
    assert len(said) == bool(note)
    for line in said:
        assert line.startswith(f"note: {note}")
        assert line.endswith(
            "but with the example input it quantises no product of their own forward"
        )


LAYERS = """
import torch
from torch import nn
class Layer(nn.Module):
    def __init__(self, up, odd):
        super().__init__()
        self.up, self.down = nn.Linear(64, up), nn.Linear(up, 64)
        self.router = nn.Sequential(nn.Linear(64, odd), nn.Linear(odd, 64))
    def forward(self, x): return self.down(self.up(x)) + self.router(x)
def build():
    layers = [Layer({up}, {odd}) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(64, {last})), torch.ones(32, 64)
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("up", "odd", "last", "filters"),
    [
        (48, 64, 64, "--filter '!up' --filter '!down'"),
        (64, 48, 64, "--filter '!*.router.*'"),
        (64, 64, 48, "--filter '!4'"),
        (48, 64, 48, "--filter '!up' --filter '!down' --filter '!4'"),
    ],
)
def test_all_linears_that_a_recipe_refuses_have_a_filter(
    tmp_path: Path, up: int, odd: int, last: int, filters: str
) -> None:
    (tmp_path / "mine.py").write_text(LAYERS.format(up=up, odd=odd, last=last))
    (model,) = register(f"{tmp_path / 'mine.py'}:build")
    recipe = every_recipe()[MX]
    options = RunOptions(models=(model.name,), recipes=(MX,))
    spec = fixed(Spec(recipe=MX, backend="linear", model=model.name), recipe)

    def noted(only: tuple[str, ...]) -> list[str]:
        one = Configuration(options, model, (), "none", "none", only, (MX,), [recipe])
        return [line for line in head(one, 10, [spec]).splitlines() if "refuses" in line]

    (note,) = noted(())
    assert f"; {filters} leaves" in note
    globs = tuple(shlex.split(filters)[1::2])
    assert not noted(globs), "the filter leaves none that is refused"
    kept = [name for name in model.linears if named(name, globs)]
    assert len(kept) == 17 - 8 * (48 in (up, odd)) - (last == 48)


@pytest.mark.parametrize(
    ("names", "others", "globs"),
    [
        (("decoder.0.q", "decoder.0.k", "decoder.1.q"), ("encoder.0.q",), ["decoder.*"]),
        (("a.0.q", "a.1.q"), ("a.0.k",), ["q"]),
        (("a.0.x.q", "a.1.x.q"), ("a.0.y.q",), ["*.x.q"]),
        (("a.0.q",), ("a.1.q",), ["a.0.q"]),
        (("a.0", "a.1"), ("a.2", "b.0"), ["a.0", "a.1"]),
        (("a.q", "a.k", "model.a.q"), ("model.b.q",), ["a.*", "model.a.q"]),
        (("a.0.q", "b.1.k"), ("b.1.q", "a.0.k"), ["a.0.q", "b.1.k"]),
    ],
)
def test_globs_match_what_is_refused_and_nothing_else(
    names: tuple[str, ...], others: tuple[str, ...], globs: list[str]
) -> None:
    assert [*_globs(names, others)] == globs
    outside = tuple(f"!{glob}" for glob in globs)
    assert [name for name in (*names, *others) if named(f"model.{name}", outside)] == [*others]


def test_a_model_that_is_a_linear_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\ndef build(): return torch.nn.Linear(48, 64), torch.ones(32, 48)\n"
    )
    (model,) = register(f"{tmp_path / 'mine.py'}:build")
    assert {product.layer for product in model.products} == set(model.linears) == {"model"}


def test_parameters_without_a_gradient_may_be_read_through_detach(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        """
import torch
class Shifted(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.shift = torch.nn.Parameter(torch.ones(8))
    def forward(self, x): return super().forward(x) + self.shift.detach()
def build(): return Shifted(), torch.ones(4, 8)
"""
    )
    (model,) = register(f"{tmp_path / 'mine.py'}:build")
    recipe = every_recipe()["torch.fp32"]
    options = RunOptions(models=(model.name,), recipes=(recipe.name,))
    one = Configuration(options, model, (), "none", "none", (), (recipe.name,), [recipe])
    (note,) = (line for line in head(one, 10, []).splitlines() if line.startswith("note: "))
    assert note == (
        "note: no gradient reaches shift in one call with what it is built with: nothing that it "
        "returns depends on that, or only through detach() or .data"
    )


ATTENDS = """
import torch, torch.nn.functional as F
from torch import nn
class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.unused = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.out = nn.Linear(128, 64)
    def forward(self, x):
        return self.out(F.linear(x, torch.cat([self.q.weight, self.k.weight])))
def build():
    return Attends(), torch.ones(32, 64)
"""


@pytest.mark.parametrize(
    ("recipe", "only", "names"),
    [(MX, (), "q, k"), (MX, ("!q",), "k"), (MX, ("out",), ""), ("torch.fp32", (), "q, k")],
)
def test_linears_whose_weights_are_only_read_are_named(
    tmp_path: Path, recipe: str, only: tuple[str, ...], names: str
) -> None:
    (tmp_path / "mine.py").write_text(ATTENDS)
    (model,) = register(f"{tmp_path / 'mine.py'}:build")
    options = RunOptions(models=(model.name,), recipes=(recipe,))
    chosen = [every_recipe()[recipe]]
    one = Configuration(options, model, (), "none", "none", only, (recipe,), chosen)
    said = head(one, 10, [])
    assert (f"note: {names}: never called, other functions read" in said) is bool(names)
    assert ("never called" in said) is bool(names)
    assert ("is checked call by call" in said) is (recipe == "torch.fp32")
    assert ("does not quantise these products" in said) is (bool(names) and recipe == MX)


def test_a_linear_that_nothing_uses_is_not_said_to_be_read(tmp_path: Path) -> None:
    """A forward that differentiates may use any parameter, but none that gets no gradient."""
    penalty = "torch.autograd.grad(y.sum(), self.q.weight, create_graph=True)[0].norm()"
    source = ATTENDS.replace("return self.out", "y = self.out")
    source = source.replace("def build", f"        return y + {penalty}\ndef build")
    (tmp_path / "mine.py").write_text(source)
    (model,) = register(f"{tmp_path / 'mine.py'}:build")
    assert "model.unused.weight" in model.gradients.elsewhere
    assert model.only_read == ("model.q", "model.k")
