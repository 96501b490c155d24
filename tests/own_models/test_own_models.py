"""A user's own model: what it is asked, when it is refused, and that its bugs are found."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from narrowfuzz.arms.model_names import layer_names
from narrowfuzz.case.events import Backward, Forward, Reload, Step
from narrowfuzz.case.spec import Case, DataSpec, Spec, dump_case, load_case
from narrowfuzz.draw.specs import fixed
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.models.model import Model
from narrowfuzz.own_models import known_as, register
from narrowfuzz.own_models.calls import observe_call
from narrowfuzz.play.own import imported
from narrowfuzz.recipe.recipe import load_recipes
from narrowfuzz.report.judged import judged_layers
from narrowfuzz.rules import RULES
from narrowfuzz.trace.verdict import fingerprint
from narrowfuzz.triage.finding import example_of
from narrowfuzz.triage.minimise import minimise
from narrowfuzz.triage.triage import triage
from narrowfuzz.triage.verify import RunScript
from torch import nn

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


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise RuntimeError('no weights here')", "importing it raised RuntimeError: no weights"),
        ("import nothing_like_it", "importing it raised ModuleNotFoundError"),
        ("import nothing_like_it.at_all", "install nothing_like_it where narrowfuzz runs"),
        ("def other(): pass", "there is no function build in it"),
        ("def build(dim): pass", "build needs dim: give it a default, or values by Literal"),
        ("def build(): raise OSError('no such checkpoint')", "build() raised OSError: no such"),
        ("def build(): import sys; sys.exit(3)", "build() raised SystemExit"),
        ("def build(): pass", "build() gives nothing; it must return a module and"),
        ("def build(): return nn.Linear(4, 4)", "build() gives a Linear; it must return a module"),
        ("def build(): return nn.Linear(4, 4), 'x'", "gives no tensor to call the model with"),
        (
            "def build(): return nn.Linear(4, 4), ((torch.ones(2, 4),), {})",
            "gives its tensors inside of other tuples or dicts, as ((args), {kwargs}) does; "
            "it must return a module and the arguments of a call: a tensor, a tuple of arguments, "
            "or a dict of arguments by name",
        ),
        ("def build(): return nn.Conv1d(3, 3, 1), torch.ones(2, 3, 4)", "it has no nn.Linear"),
        ("def build(): return nn.Linear(4, 4), torch.ones(2, 5)", "raised RuntimeError: mat1"),
        ("def build(): return nn.Linear(4, 4, device='meta'), torch.ones(2, 4)", "built on meta"),
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
    text = own("def build(): pass\ndef block(): pass\n")
    file = text.rpartition(":")[0]
    with pytest.raises(ValueError, match=r"did you mean 'build'.; its functions are build, block$"):
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
    ("vocabulary", "heads", "width"), [(512, 2, 160), (32000, 2, 24), (262144, 1, 10)]
)
def test_vocabularies_and_widths_of_real_models_are_judged_as_they_are(
    own: Own, vocabulary: int, heads: int, width: int
) -> None:
    """Head sizes of 80, 12 and 10, and 32k to 256k ids."""
    text = f"""{BLOCK}
def build():
    lm = llama.Llama({vocabulary}, {width}, 20, {heads}, 1)
    return lm.to(torch.bfloat16), torch.randint({vocabulary}, (1, 4))
"""
    (model,) = register(own(text))
    assert (model.fixed["n"], model.fixed["k"]) == (vocabulary, vocabulary)
    case = case_of(model)
    assert load_case(dump_case(case)) == case
    rules = [rule for rule in RULES if not rule.reruns]
    judgement = eager().judge(case, rules)
    assert judgement.ran and not judgement.causes
    assert tensors_of(case, RECIPES["torch.bf16"])["input"].max() > 0.5 * vocabulary


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


def test_a_model_that_draws_random_numbers_is_known_as_such(own: Own) -> None:
    text = "def build(): return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.ones(4, 8)"
    assert register(own(text))[0].random
    assert not register(own(text.replace("nn.Dropout(0.5)", "nn.GELU()"), name="calm.py"))[0].random


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


@pytest.mark.one_in(2)
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
    own: Own, file: str, build: str, recipe: str
) -> None:
    (model,) = register(f"{EXAMPLES / file}:{build}")
    case = case_of(model, recipe, checkpoint="selective", steps=2)
    judgement = Judge(RECIPES, Ledger([])).judge(case)
    assert not judgement.causes
    seen = {layer for _, _, arm, _, layer in judged_layers(judgement.verdicts, recipe, model.name)
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
    own: Own, scripts: RunScript
) -> None:
    (model,) = register(own(ANOTHER_IN_RECOMPUTE))
    judge = Judge(RECIPES, Ledger([]))
    case = case_of(model, checkpoint="full")
    found = {(v.rule, v.at.layer): v for v in judge.judge(case).causes}
    verdict = found["O13", "model.feed_forward"]  # its own forward does it, none of its linears
    result = triage(judge, case, verdict, seconds=4.0, scripts=scripts)
    assert result.confirmed, result.finding.why_suspected
    assert result.finding.minimal.spec.model == model.name, "there is no smaller model of a user's"
    assert result.finding.sentence.startswith("model.feed_forward: ")


def test_a_script_repeats_on_one_model_as_the_judge_does(own: Own, scripts: RunScript) -> None:
    """What a model keeps begins anew with another one: that would show nothing."""
    (model,) = register(own("""
class Tires(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.calls = nn.Linear(8, 8), 0
    def forward(self, x):
        self.calls += 1
        return self.proj(x) * (1.0 if self.calls < 9 else 0.5)
def build(): return Tires(), torch.ones(4, 8)
"""))  # fmt: skip
    judge = eager()
    case = case_of(model, "torch.fp32", dtype="fp32", steps=5)
    (verdict,) = (v for v in judge.judge(case).causes if v.rule == "O1")
    result = triage(judge, case, verdict, seconds=1.0, scripts=scripts)
    assert result.confirmed, result.finding.why_suspected


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


def test_a_cast_kept_over_a_step_is_found(own: Own) -> None:
    (model,) = register(own(KEPT_CAST))
    events = (Forward(), Backward(of=(0,)), Step(), Reload(), Forward(), Backward(of=(1,)), Step())
    case = case_of(model, "torch.fp32", dtype="fp32", events=events)
    causes = eager().judge(case).causes
    assert any(v.symptom == "changed by a reload" for v in causes), causes


def test_a_case_makes_no_file_run_and_names_it(own: Own, tmp_path: Path) -> None:
    text = own("print('it runs')\ndef build(): return nn.Linear(8, 8), torch.ones(4, 8)")
    case = case_of(register(text)[0], "torch.fp32", dtype="fp32")
    raw = dump_case(case)
    del MODELS[case.spec.model]
    assert load_case(raw) == case and b"mine.py:build#" in raw and str(tmp_path).encode() not in raw
    with pytest.raises(ValueError, match=r"'mine.py:build' is a user's model: name its file by"):
        Judge(RECIPES, Ledger([])).judge(case)


def test_a_file_that_has_changed_is_judged_as_it_is_now(own: Own) -> None:
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


def test_parameters_with_values_make_models_of_their_own(own: Own) -> None:
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


def test_a_finding_of_another_size_is_made_smaller_and_is_the_same_cause(own: Own) -> None:
    text = (
        SIZES.replace("nn.Sequential(*parts)", "Odd(*parts)")
        + """
class Odd(nn.Sequential):
    def forward(self, x):
        recomputed = torch._C._current_autograd_node() is not None
        return super().forward(x * (1 + 2.0**-6 * recomputed))
"""
    )
    models = register(own(text))
    judge = Judge(RECIPES, Ledger([]), frozenset({"eager", "eager+checkpoint"}))
    cases = [
        case_of(model, "torch.fp32", dtype="fp32", checkpoint="full")
        for model in (models[0], models[3])
    ]
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


def test_the_twin_is_the_model_in_float64(own: Own) -> None:
    from narrowfuzz.arms.twin import twin_outputs

    (model,) = register(own("def build(): return nn.Linear(8, 4), torch.ones(6, 8)"))
    case = case_of(model, "torch.fp32", dtype="fp32")
    tensors = tensors_of(case, RECIPES["torch.fp32"])
    x, weight, bias = (
        tensors[n].astype(np.float64) for n in ("input", "model.weight", "model.bias")
    )
    assert np.allclose(twin_outputs(case.spec, tensors)["output"], x @ weight.T + bias, rtol=1e-14)


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
        ("nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])", ("model.rest.0",)),
        ("nn.ModuleList()", ("model.rest.0",)),
        # of a linear itself no hook sees the recompute
        ("nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])", ("model.rest.0",)),
        ("nn.ModuleList([nn.Linear(8, 8), nn.ReLU()])", ("model.rest.0",)),
        ("nn.ModuleList([nn.ModuleList([nn.Linear(8, 8)])])", ("model.rest.0",)),
        # nobody calls a list
        (
            "nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])])",
            ("model.layers.0.0", "model.layers.0.1", "model.layers.1.0"),
        ),
        # and some call the parts of a block, never the block
        ("nn.ModuleList([Parts()])", ("model.rest.0",)),
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
    assert model.regions == blocks
