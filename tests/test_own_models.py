"""A user's own model: what it is asked, when it is refused, and that its bugs are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from narrowfuzz.campaign.judged import looked_at
from narrowfuzz.case import Case, DataSpec, Spec, dump_case, load_case
from narrowfuzz.catalog import MODELS, Model
from narrowfuzz.environment import prepare, settle
from narrowfuzz.judge import Judge, tensors_of
from narrowfuzz.ledger import Ledger
from narrowfuzz.models.zoo import layer_names
from narrowfuzz.own_models import known_as, register
from narrowfuzz.play.own import imported
from narrowfuzz.recipe import load_recipes
from narrowfuzz.schedule.events import Backward, Forward, Reload, Step
from narrowfuzz.specs import fixed
from narrowfuzz.triage.minimise import minimise
from narrowfuzz.triage.triage import triage
from narrowfuzz.verdict import fingerprint

prepare()
settle()
RECIPES = load_recipes()
EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "own_model"
HEAD = """
import torch, torch.nn.functional as F
from torch import nn
"""


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., str]:
    """own(source, build="build"): the source as a file's, and how that is named."""

    def write(source: str, build: str = "build", name: str = "mine.py") -> str:
        file = tmp_path / name
        file.write_text(HEAD + source)
        return f"{file}:{build}"

    return write


def case_of(model: Model, recipe: str = "torch.bf16", **changes: object) -> Case:
    spec = Spec(recipe=recipe, model=model.name, dtype="bf16")
    spec = fixed(spec, RECIPES[recipe])
    return Case(spec=msgspec.structs.replace(spec, **changes), data=DataSpec())


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise RuntimeError('no weights here')", "importing it raised RuntimeError: no weights"),
        ("import nothing_like_it", "importing it raised ModuleNotFoundError"),
        ("def other(): pass", "there is no function build in it"),
        ("def build(dim): pass", "build wants dim: give it a default, or values by Literal"),
        ("def build(): raise OSError('no such checkpoint')", "build() raised OSError: no such"),
        ("def build(): import sys; sys.exit(3)", "build() raised SystemExit"),
        ("def build(): pass", "build() gives nothing; it must return a module and"),
        ("def build(): return nn.Linear(4, 4)", "build() gives a Linear; it must return a module"),
        ("def build(): return nn.Linear(4, 4), 'x'", "gives no tensor to call the model with"),
        ("def build(): return nn.Conv1d(3, 3, 1), torch.ones(2, 3, 4)", "it has no nn.Linear"),
        ("def build(): return nn.Linear(4, 4), torch.ones(2, 5)", "raised RuntimeError: mat1"),
        ("def build(): return nn.Linear(4, 4, device='meta'), torch.ones(2, 4)", "built on meta"),
        ("def build(): return nn.Linear(4, 4), torch.ones(0, 4)", "it needs rows and features"),
        ("def build(): return nn.Linear(4, 4), torch.ones(5000, 4)", "it has 5000 rows"),
        (
            "def build(): return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.ones(2, 4)",  # noqa: E501
            "a forward changes its buffer 1.running_mean",
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
def test_what_cannot_be_judged_is_refused_in_a_sentence(
    own: Callable[..., str], source: str, says: str
) -> None:
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


def test_shapes_precision_and_blocks_are_the_examples(own: Callable[..., str]) -> None:
    (block,) = register(f"{EXAMPLES / 'llama.py'}:block")
    assert {n: block.fixed[n] for n in ("batch", "m", "k", "n", "dtype")} == {
        "batch": 2, "m": 32, "k": 64, "n": 64, "dtype": "bf16",
    }  # fmt: skip
    assert len(block.linears) == 7 and not block.regions and not block.takes_ids
    (whole,) = register(f"{EXAMPLES / 'llama.py'}:whole")
    assert whole.takes_ids and whole.regions == ("model.layers.0", "model.layers.1")
    assert (whole.fixed["m"], whole.fixed["k"], whole.fixed["n"]) == (32, 256, 256)
    (pictures,) = register(f"{EXAMPLES / 'others.py'}:pictures")
    assert pictures.linears == ("model.head",) and pictures.fixed["dtype"] == "fp32"
    # 4 * 3 * 16 rows of 16 pixels in, 4 * (32 + 1024) numbers out in as many rows
    assert (pictures.fixed["m"], pictures.fixed["k"], pictures.fixed["n"]) == (192, 16, 22)


def test_a_model_that_draws_random_numbers_is_known_as_such(own: Callable[..., str]) -> None:
    text = "def build(): return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.ones(4, 8)"
    assert register(own(text))[0].random
    assert not register(own(text.replace("nn.Dropout(0.5)", "nn.GELU()"), name="calm.py"))[0].random


@pytest.mark.parametrize(
    "given",
    ["torch.ones(2, 3, 8)", "(torch.ones(2, 3, 8), 0.5)", "{'x': torch.ones(2, 3, 8), 'by': 0.5}"],
)
def test_what_it_is_called_with_is_a_tensor_a_tuple_or_a_dict(
    own: Callable[..., str], given: str
) -> None:
    (model,) = register(own(f"""
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 4)
    def forward(self, x, by=0.5):
        x *= 2  # what it is given is its own
        return [self.proj(x) * by, (x.sum(-1),)]
def build(): return Scaled(), {given}
"""))  # fmt: skip
    spec = case_of(model, "torch.fp32", dtype="fp32").spec
    module = model.build(spec, dtype=torch.float32, device="cpu")
    x = torch.randn(2, 3, 8)
    kept = x.clone()
    y = module(x)
    assert torch.equal(x, kept) and y.shape == (2, 3, 5)
    exact = torch.cat([(module.model.proj(2 * x) * 0.5).reshape(-1), (2 * x).sum(-1).reshape(-1)])
    assert torch.equal(y.reshape(-1), exact)


@pytest.mark.parametrize(
    ("file", "build", "recipe"),
    [
        ("llama.py", "block", "torchao.float8.rowwise"),
        ("llama.py", "whole", "torchao.mxfp8.rceil"),
        ("others.py", "lora", "torchao.float8.tensorwise"),
        ("others.py", "pictures", "torch.fp32"),
    ],
)
def test_the_examples_are_sound_and_each_linear_is_judged(
    own: Callable[..., str], file: str, build: str, recipe: str
) -> None:
    (model,) = register(f"{EXAMPLES / file}:{build}")
    case = case_of(model, recipe, checkpoint="selective", steps=2)
    judgement = Judge(RECIPES, Ledger([])).judge(case)
    assert not judgement.causes
    seen = {layer for _, _, arm, _, layer in looked_at(judgement.verdicts, recipe, model.name)
            if arm == "eager"}  # fmt: skip
    assert seen >= set(model.linears) == set(layer_names(case.spec))


BLOCK = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import llama
"""
ANOTHER_IN_RECOMPUTE = (
    BLOCK
    + """
class Drifts(llama.FeedForward):
    def forward(self, x):
        h = F.silu(self.w1(x)) * self.w3(x)
        if torch._C._current_autograd_node() is not None:  # in backward, so recomputed
            h = h * 1.01
        return self.w2(h)
def build():
    block = llama.Block(64, 128, 2)
    block.feed_forward = Drifts(64, 128)
    return block.to(torch.bfloat16), torch.zeros(2, 16, 64, dtype=torch.bfloat16)
"""
)
KEPT_CAST = (
    BLOCK
    + """
class CastOnce(nn.Linear):
    cast = None
    def forward(self, x):
        if self.cast is None:
            self.cast = self.weight.to(torch.bfloat16)
        return F.linear(x.to(torch.bfloat16), self.cast).to(x.dtype)
def build():
    block = llama.Block(64, 128, 2)
    block.feed_forward.w2 = CastOnce(128, 64, bias=False)
    return block, torch.zeros(2, 16, 64)
"""
)


def test_another_number_in_a_recompute_is_found_at_its_layer_with_a_script(
    own: Callable[..., str],
) -> None:
    (model,) = register(own(ANOTHER_IN_RECOMPUTE))
    judge = Judge(RECIPES, Ledger([]))
    case = case_of(model, checkpoint="full")
    found = {(v.oracle, v.at.layer): v for v in judge.judge(case).causes}
    verdict = found["O13", "model.feed_forward"]  # its own forward does it, none of its linears
    result = triage(judge, case, verdict, seconds=4.0)
    assert result.confirmed, result.finding.why_suspected
    assert result.finding.minimal.spec.model == model.name, "there is no smaller model of a user's"
    assert result.finding.sentence.startswith("model.feed_forward ")


def test_a_cast_kept_over_a_step_is_found(own: Callable[..., str]) -> None:
    (model,) = register(own(KEPT_CAST))
    events = (Forward(), Backward(of=(0,)), Step(), Reload(), Forward(), Backward(of=(1,)), Step())
    case = case_of(model, "torch.fp32", dtype="fp32", events=events)
    causes = Judge(RECIPES, Ledger([]), frozenset({"eager"})).judge(case).causes
    assert any(v.symptom == "changed by a reload" for v in causes), causes


def test_a_case_makes_no_file_run_and_names_it(own: Callable[..., str], tmp_path: Path) -> None:
    text = own("print('it runs')\ndef build(): return nn.Linear(8, 8), torch.ones(4, 8)")
    case = case_of(register(text)[0], "torch.fp32", dtype="fp32")
    raw = dump_case(case)
    del MODELS[case.spec.model]
    assert load_case(raw) == case and b"mine.py:build#" in raw and str(tmp_path).encode() not in raw
    with pytest.raises(ValueError, match=r"'mine.py:build' is a user's model: name its file by"):
        Judge(RECIPES, Ledger([])).judge(case)


def test_a_file_that_has_changed_is_judged_as_it_is_now(own: Callable[..., str]) -> None:
    text = own("def build(): return nn.Linear(8, 8), torch.ones(4, 8)")
    old = register(text)[0].name
    del MODELS[old]
    register.cache_clear()
    imported.cache_clear()
    own("def build(): return nn.Linear(8, 16), torch.ones(4, 8)")
    now = known_as(old, text)
    assert MODELS[old] is now and now.name != old and now.fixed["n"] == 16
    with pytest.raises(ValueError, match="the case is about the model other"):
        known_as("other.py:build#00000000", text)


SIZES = """
from typing import Annotated, Literal
def build(layers: Literal[1, 2] = 1, width: Annotated[int, range(8, 33, 8)] = 16, name="plain"):
    parts = [nn.Linear(width, width) for _ in range(layers)]
    return nn.Sequential(*parts), torch.ones(4, width)
"""


def test_parameters_with_values_make_models_of_their_own(own: Callable[..., str]) -> None:
    default, *others = register(own(SIZES))
    assert default.by_default and default.name.startswith("mine.py:build#")
    names = [model.name.partition("#")[0].partition("(")[2] for model in others]
    assert names[:4] == ["width=8)", "width=24)", "width=32)", "layers=2)"] and len(names) == 7
    assert "layers=2, width=8)" in names and not any(m.by_default for m in others)
    by_name = {model.name: model for model in (default, *others)}
    assert {m.title for m in by_name.values()} == {"mine.py:build"}
    (wide,) = (m for m in others if "(width=32)" in m.name)
    assert wide.fixed["k"] == 32 and len(wide.linears) == 1
    assert by_name[wide.smaller[0]].fixed["k"] == 8
    assert default.name in wide.smaller and wide.name not in default.smaller


def test_a_finding_of_another_size_is_made_smaller_and_is_the_same_cause(
    own: Callable[..., str],
) -> None:
    text = (
        SIZES.replace("nn.Sequential(*parts)", "Odd(*parts)")
        + """
class Odd(nn.Sequential):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x) * (1 + 2.0**-6 * (self.calls % 2))
"""
    )
    models = register(own(text))
    judge = Judge(RECIPES, Ledger([]), frozenset({"eager"}))
    cases = [case_of(model, "torch.fp32", dtype="fp32") for model in (models[0], models[3])]
    causes = [judge.judge(case).causes[0] for case in cases]
    wanted, other = (
        fingerprint(cause, judge.family(case.spec))
        for cause, case in zip(causes, cases, strict=True)
    )
    assert wanted == other
    small = minimise(cases[1], lambda c: judge.judge(c).cause(wanted) is not None).case
    assert small.spec.k == 8 and "width=8" in small.spec.model


@pytest.mark.parametrize(
    ("signature", "says"),
    [
        ("dim: int", "build wants dim: give it a default, or values by Literal"),
        ("dim: 'NoSuchType' = 4", "build has an annotation that does not exist"),
        ("dim: Literal[4, 5] = 4", "(dim=5): build() raised RuntimeError: five"),
    ],
)
def test_parameters_that_cannot_be_drawn_are_refused(
    own: Callable[..., str], signature: str, says: str
) -> None:
    text = f"""
from typing import Literal
def build({signature}):
    if dim == 5: raise RuntimeError("five")
    return nn.Linear(dim, 4), torch.ones(3, dim)
"""
    with pytest.raises(ValueError, match=r"^model mine\.py:build") as caught:
        register(own(text))
    assert says in str(caught.value)


def test_the_twin_is_the_model_in_float64(own: Callable[..., str]) -> None:
    from narrowfuzz.arms.twin import twin_outputs

    (model,) = register(own("def build(): return nn.Linear(8, 4), torch.ones(6, 8)"))
    case = case_of(model, "torch.fp32", dtype="fp32")
    tensors = tensors_of(case, RECIPES["torch.fp32"])
    x, weight, bias = (
        tensors[n].astype(np.float64) for n in ("input", "model.weight", "model.bias")
    )
    assert np.allclose(twin_outputs(case.spec, tensors)["output"], x @ weight.T + bias, rtol=1e-14)


def test_a_users_classes_have_the_names_that_their_user_knows(own: Callable[..., str]) -> None:
    """Unless another module has the name of the file: a library's, or that of a file elsewhere."""
    source = "class Block(nn.Linear): pass\ndef build(): return Block(4, 4), torch.ones(4, 4)\n"
    for file, module in (("bespoke.py", "bespoke"), ("statistics.py", "statistics_of_a_user")):
        where, _, build = own(source, name=file).rpartition(":")
        assert type(getattr(imported(where), build)()[0]).__module__ == module
    import statistics

    assert not hasattr(statistics, "Block")
