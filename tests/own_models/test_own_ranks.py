"""A user's own model on ranks: each has a batch of its own, as the ranks of FSDP and DDP do."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from narrowfuzz.case.layout import check_sharding, fitting
from narrowfuzz.case.layout.mesh import MESH, why_alone
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.draw.choices import examples
from narrowfuzz.draw.sharded_specs import sharded_specs
from narrowfuzz.draw.specs import fixed
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger, load_ledger
from narrowfuzz.models.model import Model
from narrowfuzz.own_models import register
from narrowfuzz.triage.avoid import avoided_by
from narrowfuzz.triage.verify import RunScript
from samples import recipes
from scripts_of_findings import assert_shows, script_on_ranks

Fields = dict[str, Any]
PAGES = Path(__file__).parent
RECIPES = recipes()
TWO_STEPS: Fields = {"steps": 2, "optimizer": "adamw"}
#: As FSDP and DDP are used: shards of each block, mixed precision of gradients, and replicas.
FSDP: Fields = {"data": 2, "units": "each", "reduces_fp32": True}
DDP: Fields = {"data": 2, "replicas": 2, "ddp": "static"}


def page(name: str) -> Model:
    """The model of a file beside this one."""
    return register(f"{PAGES / name}.py:build")[0]


def laid_out(model: Model, recipe: str, sharding: Fields, **fields: Any) -> Spec:
    spec = Spec(recipe=recipe, model=model.name, grad_mode="train", **fields)
    spec = fixed(spec, RECIPES[recipe])
    return fitting(msgspec.structs.replace(spec, sharding=Sharding(**sharding)))


def judged(spec: Spec, seed: int = 2) -> Any:
    return Judge(RECIPES, Ledger([])).judge(Case(spec=spec, data=DataSpec(seed=seed)))


def broken(found: Any) -> set[str]:
    return {v.rule for v in found.verdicts if v.status in ("diverged", "crashed")}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("sharding", [FSDP, DDP], ids=["fsdp", "ddp"])
@pytest.mark.parametrize(
    "name",
    ["bilinear", "causal_mask", "token_types", "batch_norm", "masked_weight", "read_twice"],
)
def test_a_page_is_silent_on_ranks(name: str, sharding: Fields) -> None:
    """bilinear's second argument is drawn anew whenever it is built, by the generator that all
    threads share; token_types takes ids, whose embedding other functions read."""
    model = page(name)
    spec = laid_out(model, f"torch.{model.fixed['dtype']}", sharding, **TWO_STEPS)
    check_sharding(spec, RECIPES[spec.recipe].shards)
    found = judged(spec)
    assert not broken(found)
    assert {"S1", "S2"} <= {v.rule for v in found.verdicts if v.status == "ok"}


def test_each_rank_has_a_batch_like_the_example() -> None:
    model = page("causal_mask")
    given, spec = model.fixed, laid_out(model, "torch.fp32", {"data": 3})
    assert (spec.batch, spec.m) == (3 * given["batch"], given["m"])
    check_sharding(spec, ["fsdp"])
    with pytest.raises(ValueError, match="divide evenly"):
        check_sharding(msgspec.structs.replace(spec, batch=given["batch"]), ["fsdp"])


@pytest.mark.heavy
def test_ranks_that_are_processes_build_it_themselves() -> None:
    spec = laid_out(page("bilinear"), "torch.fp32", FSDP | {"processes": True})
    found = judged(spec)
    assert not broken(found)
    assert any(v.rule == "S10" and v.status == "ok" for v in found.verdicts)


def test_a_wrong_sum_over_ranks_is_found_with_a_script(tmp_path: Path, scripts: RunScript) -> None:
    shown = Case(spec=laid_out(page("bilinear"), "torch.fp32", {"data": 2}), data=DataSpec(seed=2))
    path = script_on_ranks(shown, "fsdp-sum-for-mean", RECIPES["torch.fp32"], tmp_path)
    assert_shows(scripts, path, ("", "fsdp-sum-for-mean"))


def test_an_empty_shard_is_known_by_the_rows_of_all_linears() -> None:
    """The head for values has one row, and is not called: float8 reduces its maximum, too."""
    layout = {"data": 2, "gathers": "precomputed"}
    spec = laid_out(page("unused_branch"), "torchao.float8.tensorwise", layout, **TWO_STEPS)
    found = Judge(RECIPES, load_ledger()).judge(Case(spec=spec, data=DataSpec()))
    assert {v.explained_by for v in found.verdicts if v.rule == "contract"} == {
        "float8-gather-uneven-shards"
    }


BODY = """
import contextvars
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

KEPT = {{}}
MODE = contextvars.ContextVar("mode")
MODE.set(2.0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.b(self.a(x))


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.s = nn.Parameter({s})

    def forward(self, x):
        KEPT["x"] = x
        for block in self.blocks:
            x = block(x)
        return {returns}

    def seeded(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return torch.randn(16)


def build():
    m = M()
    {then}
    return m, torch.ones(4, 16, dtype=m.a.weight.dtype)
"""


TALL = "self.a(x) @ self.s.t()"
#: As experts are skipped to which no token goes.
SKIPS = "self.a(x) * self.s if x.abs().max() < 8 else self.a(x)"
#: The same, by a model that refuses inputs that are not finite: others tell of it nevertheless.
FINITE = f"{SKIPS} if x.isfinite().all() else 1 / 0"


def small(folder: Path, **parts: str) -> Model:
    """A model of two blocks, a linear and a parameter ``s``, with these parts of its source."""
    usual = {"s": "torch.ones(16)", "returns": "self.a(x) * self.s", "then": ""}
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:8]
    file = folder / f"small_{digest}.py"
    file.write_text(BODY.format(**usual | parts))
    return register(f"{file}:build")[0]


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"returns": "F.dropout(self.a(x) * self.s, 0.5)"}, "random numbers"),
        ({"then": "m.half()"}, "are fp16"),
        (
            {"then": "m.bfloat16().s.data = torch.ones(16)", "returns": "self.a(x) * self.s"},
            "several dtypes: model.s is fp32",
        ),
        (
            {
                "s": "torch.ones(4, 16)",
                "returns": "F.embedding(torch.arange(4), self.s, sparse=True) + self.a(x)",
            },
            "s gets sparse gradients",
        ),
        # real ranks are processes, which share neither a module nor a generator
        ({"returns": "self.a(x) * self.s + KEPT['x']"}, "computes something else"),
        ({"returns": "self.a(x) * self.s + self.seeded()"}, "computes something else"),
        ({"returns": "self.a(x) * self.s * MODE.get()"}, "raises LookupError"),
        (
            {"returns": "self.a(x) * self.s * (2.0 if dist.is_initialized() else 1.0)"},
            "computes something else",
        ),
    ],
)
def test_ranks_do_not_train_what_they_could_not_be_compared_with(
    tmp_path: Path, parts: dict[str, str], why: str
) -> None:
    model = small(tmp_path, **parts)
    assert why in why_alone(model)
    assert not MESH.takes(model.name)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("sharding", "fields", "parts", "why"),
    [
        ({"data": 2}, {}, {"s": "torch.ones(())"}, "model.s is a scalar: give ddp"),
        ({"data": 2}, {}, {"s": "torch.ones(16, 4).t()", "returns": TALL}, "s is not contiguous"),
        ({"data": 2}, {}, {"then": "m.s.register_hook(torch.neg)"}, "drop the hook of the param"),
        ({"data": 2}, {}, {"returns": SKIPS}, "gets a gradient with some inputs only: give ddp"),
        ({"data": 2}, {}, {"returns": FINITE}, "gets a gradient with some inputs only: give ddp"),
        (DDP, {}, {"returns": SKIPS}, "gets a gradient with some inputs only: give ddp 'unused'"),
        (DDP | {"ddp": "plain"}, {}, {"returns": "self.a(x)"}, "give ddp 'static' or 'unused'"),
        ({"data": 2, "resumes": "same"}, TWO_STEPS, {"returns": "self.a(x)"}, "give resumes ''"),
        ({"data": 2, "resumes": "fewer"}, TWO_STEPS, {}, "batches of another size"),
        (
            {"data": 2, "resumes": "same"},
            TWO_STEPS,
            {"then": "m.register_state_dict_post_hook(lambda _, d, *__: d.update(t=1))"},
            "names of no parameters: give resumes ''",
        ),
        ({"data": 2}, {"checkpoint": "reentrant"}, {}, "that are not reentrant"),
    ],
)
def test_a_layout_that_torch_does_not_support_is_one_sentence(
    tmp_path: Path, sharding: Fields, fields: Fields, parts: dict[str, str], why: str
) -> None:
    spec = laid_out(small(tmp_path, **parts), "torch.fp32", sharding, **fields)
    with pytest.raises(ValueError, match=why):
        check_sharding(spec, ["fsdp"])


def test_a_run_of_it_on_ranks_draws_nothing_else(tmp_path: Path) -> None:
    model = small(tmp_path)
    drawn = examples(sharded_specs([RECIPES["torch.fp32"]], (model.name,)), 40)
    assert {spec.model for spec in drawn} == {model.name}


def test_an_error_on_ranks_is_not_avoided_by_sizes_that_the_file_sets(tmp_path: Path) -> None:
    given = "int('no number') if dist.is_initialized() and len(torch.unique(x)) > 40 else"
    model = small(tmp_path, returns=f"{given} self.a(x) * self.s")
    case = Case(spec=laid_out(model, "torch.fp32", {"data": 3}), data=DataSpec(seed=2))
    judge = Judge(RECIPES, Ledger([]))
    (verdict,) = judge.judge(case).causes
    assert verdict.rule == "contract"
    assert avoided_by(judge, case, verdict) == []


@pytest.mark.parametrize("fields", [{}, {"steps": 2, "optimizer": "sgd"}], ids=["none", "steps"])
def test_gradients_that_only_some_ranks_make_are_compared_with_their_own_step(
    tmp_path: Path, fields: Fields
) -> None:
    model = small(tmp_path, returns="self.a(x) * self.s if x[0, 0] > 0 else self.a(x)")
    spec = laid_out(model, "torch.fp32", DDP | {"ddp": "unused"}, **fields)
    for seed in range(8):
        assert not broken(judged(spec, seed))


@pytest.mark.parametrize(
    ("returns", "units"),
    [
        ("self.a(x) * self.s", ("model.blocks.0", "model.blocks.1")),
        ("F.linear(x, self.blocks[0].a.weight) + self.a(x)", ("model.blocks.1",)),
        ("((x + self.s) * self.s + self.a(x)) * self.s", ()),
    ],
    ids=["blocks", "read from outside", "three gradients to add"],
)
def test_fsdp_gathers_blocks_that_nothing_else_reads(
    tmp_path: Path, returns: str, units: tuple[str, ...]
) -> None:
    assert small(tmp_path, returns=returns).units == units
