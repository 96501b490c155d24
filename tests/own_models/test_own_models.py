"""A user's own model: what is read of it, and what it may be called with and return."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from narrowfuzz.case.events import Backward, Forward, Step
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.draw.specs import fixed
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.models.model import Model
from narrowfuzz.own_models import register
from narrowfuzz.play.own import imported
from narrowfuzz.recipe.recipe import load_recipes
from narrowfuzz.triage.finding import example_of

RECIPES = load_recipes()
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "own_model"
#: Writes a user's file: its source, and what its function and the file are called; FILE:FUNCTION.
Own = Callable[..., str]
HEAD = """
import torch, torch.nn.functional as F
from torch import nn
"""


@pytest.fixture
def own(tmp_path: Path) -> Own:
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


def made(model: Model) -> Any:
    """Its module in fp32."""
    spec = case_of(model, "torch.fp32", dtype="fp32").spec
    return model.build(spec, dtype=torch.float32, device="cpu")


def eager() -> Judge:
    return Judge(RECIPES, Ledger([]), frozenset({"eager"}))


# Sources that other test modules use, too.

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


EVERY_SECOND = """
class EverySecond(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.calls = nn.Linear(8, 8), 0
    def forward(self, x):
        self.calls += 1
        y = self.proj(x)
        return y * 1.125 if self.calls % {every} == 0 else y
class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), EverySecond(), nn.Linear(8, 8)])
    def forward(self, ids):
        h = self.table(ids)
        for block in self.blocks:
            h = h + block(h)
        return h
def build(): return Whole(), torch.randint(16, (2, 4))
"""


SIZES = """
from typing import Annotated, Literal
def build(layers: Literal[1, 2] = 1, width: Annotated[int, range(8, 33, 8)] = 16, name="plain"):
    parts = [nn.Linear(width, width) for _ in range(layers)]
    return nn.Sequential(*parts), torch.ones(4, width)
"""


def test_shapes_precision_and_blocks_are_the_examples(own: Own) -> None:
    (block,) = register(f"{EXAMPLES / 'llama.py'}:block")
    assert {n: block.fixed[n] for n in ("batch", "m", "k", "n", "dtype")} == {
        "batch": 2, "m": 32, "k": 64, "n": 64, "dtype": "bf16",
    }  # fmt: skip
    assert len(block.linears) == 7 and not block.regions and not block.takes_ids
    assert block.inputs == ("[2, 32, 64] bfloat16",)
    assert example_of(case_of(block)).startswith(
        "llama.py:block called with [2, 32, 64] bfloat16, "
    )
    linear = example_of(Case(spec=Spec(recipe="torch.bf16"), data=DataSpec()))
    assert " in, " in linear and "called with" not in linear
    (whole,) = register(f"{EXAMPLES / 'llama.py'}:whole")
    assert whole.takes_ids and whole.regions == ("model.layers.0", "model.layers.1")
    assert (whole.fixed["m"], whole.fixed["k"], whole.fixed["n"]) == (32, 256, 256)
    (pictures,) = register(f"{EXAMPLES / 'others.py'}:pictures")
    assert pictures.linears == ("model.head",) and pictures.fixed["dtype"] == "fp32"
    # 4 * 3 * 16 rows of 16 pixels in, 4 * (32 + 1024) numbers out in as many rows
    assert (pictures.fixed["m"], pictures.fixed["k"], pictures.fixed["n"]) == (192, 16, 22)


IDS = """
class Model(nn.Module):
    def __init__(self, many=50304):
        super().__init__()
        self.words, self.places = nn.Embedding(many, 8), nn.Embedding(16, 8)
        self.kinds, self.head = nn.Embedding(2, 8), nn.Linear(8, 4)
    def forward(self, input_ids, token_type_ids=None, attention_mask=None, labels=None):
        places = torch.arange(input_ids.shape[1])
        kinds = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        h = self.words(input_ids) + self.places(places) + self.kinds(kinds)
        if attention_mask is not None:
            h = h * attention_mask.unsqueeze(-1)
        logits = self.head(h)
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits
"""
MASK = "attention_mask=torch.ones(2, 8), "


@pytest.mark.parametrize(
    "ids", ["torch.randint(50304, (2, 8))", "torch.zeros(2, 8, dtype=torch.long)",
            "torch.arange(8).repeat(2, 1)"],
)  # fmt: skip
def test_ids_are_those_of_the_table_that_the_input_reaches(own: Own, ids: str) -> None:
    """Not of positions or of kinds of tokens, which are fewer."""
    (model,) = register(own(f"{IDS}def build(): return Model(), {ids}"))
    assert model.takes_ids and model.fixed["n"] == 50304 and model.fixed["k"] == 4


@pytest.mark.parametrize(
    "more", ["", "token_type_ids=torch.zeros(2, 8).long(), ", MASK, MASK.replace("8)", "8).long()")]
)
def test_what_is_called_by_names_keeps_its_labels_masks_and_kinds(own: Own, more: str) -> None:
    (model,) = register(own(f"""{IDS}
def build():
    ids, labels = torch.randint(50304, (2, 8)), torch.randint(4, (2, 8))
    return Model(), dict({more}input_ids=ids, labels=labels)
"""))  # fmt: skip
    module = made(model)
    if "ones(2, 8), " in more:  # a mask of floats stands first, and is what a user gives first
        assert module.driven == "attention_mask"
        return
    assert module.driven == "input_ids" and model.fixed["n"] == 50304
    ids = torch.randint(50304, (2, 8))
    loss, logits = module.model(**{**module.given, "input_ids": ids})
    assert torch.equal(module(ids).reshape(-1)[:65], torch.cat([loss[None], logits.flatten()]))


RETURNED = """
import collections, dataclasses, typing
@dataclasses.dataclass
class Record:
    loss: torch.Tensor
    hidden: tuple
class Named(typing.NamedTuple):
    loss: torch.Tensor
    hidden: tuple
class Output(collections.OrderedDict): pass
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 4)
    def forward(self, x):
        y = self.proj(x)
        return Kind(loss=y.sum(), hidden=(y, None))
def build(): return Model(), torch.ones(2, 8)
"""


@pytest.mark.parametrize("kind", ["Record", "Named", "Output", "dict"])
def test_records_and_mappings_may_come_out(own: Own, kind: str) -> None:
    (model,) = register(own(RETURNED.replace("Kind(", f"{kind}(")))
    assert model.fixed["n"] * 2 >= 9
    judgement = eager().judge(case_of(model, "torch.fp32", dtype="fp32"))
    assert judgement.ran and not judgement.causes


@pytest.mark.parametrize(
    "given",
    ["torch.ones(2, 3, 8)", "(torch.ones(2, 3, 8), 0.5)", "{'x': torch.ones(2, 3, 8), 'by': 0.5}"],
)
def test_what_it_is_called_with_is_a_tensor_a_tuple_or_a_dict(own: Own, given: str) -> None:
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
    module = made(model)
    x = torch.randn(2, 3, 8)
    kept = x.clone()
    y = module(x)
    assert torch.equal(x, kept) and y.shape == (2, 3, 5)
    exact = torch.cat([(module.model.proj(2 * x) * 0.5).reshape(-1), (2 * x).sum(-1).reshape(-1)])
    assert torch.equal(y.reshape(-1), exact)


def test_what_is_built_in_eval_mode_stays_in_it(own: Own) -> None:
    text = """
def build():
    norm = nn.BatchNorm1d(8).eval()
    return nn.Sequential(nn.Linear(8, 8), norm, nn.Dropout(0.5)), torch.ones(4, 8)
"""
    (model,) = register(own(text))
    module = made(model)
    assert [m.training for m in module.train().model] == [True, False, True]
    assert not any(m.training for m in module.eval().model)
    events = (Forward(), Backward(of=(0,)), Step(), Forward(mode="eval"), Forward())
    case = case_of(model, "torch.fp32", dtype="fp32", events=events)
    assert not eager().judge(case).causes


def test_parameters_that_no_gradient_reaches_are_noted(own: Own) -> None:
    text = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle, self.frozen = (nn.Linear(8, 8) for _ in range(3))
        self.frozen.requires_grad_(False)
    def forward(self, x):
        return self.used(x) + self.idle(x).detach() + self.frozen(x)
def build(): return Model(), torch.ones(2, 8)
"""
    assert register(own(text))[0].unreached == ("idle.weight", "idle.bias")


def test_the_operators_that_a_model_calls_are_known(own: Own) -> None:
    """Those of its backward, too."""
    text = "def build(): return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.ones(4, 8)"
    called = register(own(text))[0].operators
    assert called is not None and {"layer_norm", "layer_norm_backward", "sum"} <= called
    assert not any(name.startswith(("softmax", "attention", "embedding")) for name in called)


def test_operators_are_known_where_backward_needs_a_buffer_that_each_forward_changes(
    own: Own,
) -> None:
    text = """
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.idle = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
    def forward(self, x):
        self.scale.mul_(0.9)
        return F.softmax(self.proj(x) * self.scale, -1)
def build(): return Scaled(), torch.ones(4, 8)
"""
    (model,) = register(own(text))
    assert model.operators is not None and {"softmax", "softmax_backward"} <= model.operators
    assert model.unreached == ("idle.weight", "idle.bias")


@pytest.mark.parametrize("transform", ["torch.func.vmap", "torch.func.functionalize", "rows_grad"])
def test_a_transform_of_torch_func_may_call_modules(own: Own, transform: str) -> None:
    text = f"""
class Norm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.norm = nn.Linear(8, 8), Norm()
    def forward(self, x):
        return {transform}(self.norm)(self.proj(x))
def rows_grad(norm):
    return torch.func.vmap(torch.func.grad(lambda row: norm(row).sum()))
def build(): return Model(), torch.ones(4, 8)
"""
    (model,) = register(own(text))
    found = eager().judge(case_of(model, "torch.fp32", dtype="fp32"))
    assert found.ran and not found.causes


def test_a_model_that_draws_random_numbers_is_known_as_such(own: Own) -> None:
    text = "def build(): return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.ones(4, 8)"
    assert register(own(text))[0].random
    assert not register(own(text.replace("nn.Dropout(0.5)", "nn.GELU()"), name="calm.py"))[0].random


def test_a_users_classes_have_the_names_that_their_user_knows(own: Own) -> None:
    """Unless another module has the name of the file: a library's, or that of a file elsewhere."""
    source = "class Block(nn.Linear): pass\ndef build(): return Block(4, 4), torch.ones(4, 4)\n"
    for file, module in (("bespoke.py", "bespoke"), ("statistics.py", "statistics_of_a_user")):
        where, _, build = own(source, name=file).rpartition(":")
        assert type(getattr(imported(where), build)()[0]).__module__ == module
    import statistics

    assert not hasattr(statistics, "Block")


@pytest.mark.parametrize(
    ("parts", "blocks"),
    [
        ("nn.ModuleList([Block()])", ("model.layers.0",)),
        ("nn.ModuleList([Block(), Block()])", ("model.layers.0", "model.layers.1")),
        ("nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])", ()),
        ("nn.ModuleList()", ()),
        # of a linear itself no hook sees the recompute
        ("nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])", ()),
        ("nn.ModuleList([nn.Linear(8, 8), nn.ReLU()])", ()),
        ("nn.ModuleList([nn.ModuleList([nn.Linear(8, 8)])])", ()),
        # nobody calls a list
        (
            "nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])])",
            ("model.layers.0.0", "model.layers.0.1", "model.layers.1.0"),
        ),
        # and some call the parts of a block, never the block
        ("nn.ModuleList([Parts()])", ()),
    ],
)
def test_what_is_recomputed_one_by_one(own: Own, parts: str, blocks: tuple[str, ...]) -> None:
    (model, *_) = register(
        own(f"""
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return self.linear(x)
class Parts(Block): pass
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.rest = {parts}, nn.ModuleList([Block()])
    def forward(self, x):
        for part in (*self.layers, *self.rest):
            for one in part if isinstance(part, nn.ModuleList) else [part]:
                x = one.linear(x) if isinstance(one, Parts) else one(x)
        return x
def build(): return Model(), torch.ones(4, 8)
""")
    )
    assert model.regions == (*blocks, "model.rest.0")


BLOCKS = """
class Block(nn.Module):
    def __init__(self, part=None):
        super().__init__()
        self.linear, self.part = nn.Linear(8, 8), part
    def forward(self, x):
        return self.linear(x if self.part is None else self.part[0](x))
class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        experts = [Block(), Block()]
        self.layers = nn.ModuleList(Block([one]) for one in experts)
        self.experts = nn.ModuleList(experts)
    def forward(self, x):
        for one in self.layers: x = one(x)
        return x
class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([Block(), Block()])
        self.layers = nn.ModuleList(Outer(one) for one in self.experts)
    def forward(self, x):
        for one in self.layers: x = one(x)
        return x
class Outer(Block):
    def __init__(self, part):
        super().__init__()
        self.part = nn.Sequential(part)
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.again = nn.ModuleList(reversed(self.layers))
    def forward(self, x):
        for one in (*self.layers, *self.again): x = one(x)
        return x
class WithoutGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, blocks):
        ctx.blocks = blocks
        ctx.save_for_backward(x)
        return blocks[0](x)
    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.blocks[0](x)
        y.backward(grad)
        return x.grad, None
class Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList([Block()])
    def forward(self, x):
        return WithoutGraph.apply(self.first(x), self.layers)
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([Block()])
        self.decoder = nn.ModuleList([Block(), Block()])
    def forward(self, x):
        for one in (*self.encoder, *self.decoder): x = one(x)
        return x
def build(): return OF(), torch.ones(4, 8)
"""


@pytest.mark.parametrize(
    ("of", "blocks"),
    [
        # the experts are called inside of the blocks, wherever they are stored
        ("Inside", ("model.layers.0", "model.layers.1")),
        ("First", ("model.layers.0", "model.layers.1")),
        ("Twice", ("model.layers.0", "model.layers.1")),
        ("Reversible", ()),
        ("Two", ("model.encoder.0", "model.decoder.0", "model.decoder.1")),
    ],
)
def test_blocks_that_no_checkpoint_of_their_own_recomputes(
    own: Own, of: str, blocks: tuple[str, ...]
) -> None:
    (model, *_) = register(own(BLOCKS.replace("OF", of)))
    assert model.regions == blocks
