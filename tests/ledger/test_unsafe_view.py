"""What is written in place into a product that a selective checkpoint kept: the known issue of
``_unsafe_view``, its cure, and what looks like it and is something else."""

# ruff: noqa: F811

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from narrowfuzz.judge.fold import Judgement
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import Ledger, load_entries, stands
from narrowfuzz.ledger.mitigations import a_copy_of_what_is_written_through_an_unsafe_view as cure
from narrowfuzz.own_models import register
from narrowfuzz.plants.patching import attribute_replaced
from narrowfuzz.rules.contract import CHANGED_IN_PLACE
from own_models.test_own_models import RECIPES, case_of, own  # noqa: F401
from torch.utils import checkpoint

(ENTRY,) = (entry for entry in load_entries() if entry.id == "sac-unsafe-view-in-place")

pytestmark = pytest.mark.skipif(
    stands(ENTRY) != "named", reason="the entry names other versions of torch"
)

MODEL = """
class Model(nn.Module):
    def __init__(self, write, *, bias=False):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=bias), nn.Linear(64, 32, bias=bias)
        self.other = nn.Linear(32, 64, bias=bias)
        self.gain = nn.Parameter(torch.eye(32))
        self.write = write
        self.drop = nn.Dropout(0.5, inplace=True)
    def forward(self, x):
        return self.down(torch.sin(self.write(self, x)))

def scales(model, x):
    y = model.up(x)
    y *= 2
    return y
def drops(model, x):
    return model.drop(model.up(x))
def clamps(model, x):
    return model.up(x).clamp_(-0.5, 0.5).neg_()
def adds_to_a_product_of_its_own(model, x):
    y = x @ model.gain
    y += 1
    return model.up(y)
def attends(model, x):
    q = model.up(x)
    q *= 0.5
    k = model.other(x)[:, None]
    return F.scaled_dot_product_attention(q[:, None], k, k)[:, 0]
def by_data(model, x):
    y = model.up(x)
    y.data *= 2
    return y
def scales_a_copy(model, x):
    return model.up(x).clone().mul_(2)
def scaled(model, x):
    return model.up(x) * 2
"""


def model_of(write: str, sizes: str = "2, 16, 32", bias: bool = False) -> str:
    made = f"Model({write}, bias={bias}), torch.randn({sizes})"
    return f"{MODEL}\ndef build():\n    return {made}\n"


def judged(named: str, ledger: Ledger) -> Judgement:
    """The model in fp32 under a selective checkpoint."""
    (model,) = register(named)
    case = case_of(model, "torch.fp32", dtype="fp32", checkpoint="selective")
    return Judge(RECIPES, ledger).judge(case)


def explained(judgement: Judgement) -> set[str]:
    return {verdict.explained_by for verdict in judgement.known}


WRITES = {
    "scales": "2, 16, 32",
    "scales, a batch of batches": "2, 2, 8, 32",
    "drops": "2, 16, 32",
    "clamps": "2, 16, 32",
    "adds_to_a_product_of_its_own": "2, 16, 32",
    "attends": "2, 16, 32",
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_through_an_unsafe_view_is_known(
    own: Callable[..., str], write: str
) -> None:
    named = own(model_of(write.partition(",")[0], WRITES[write]))
    assert judged(named, Ledger([])).causes
    known = judged(named, Ledger([ENTRY]))
    assert not known.causes and explained(known) == {ENTRY.id}


@pytest.mark.parametrize(
    ("sizes", "bias"), [("32, 32", False), ("2, 16, 32", True)], ids=["2-D", "with a bias"]
)
def test_where_torch_sees_the_write_it_is_not_this(
    own: Callable[..., str], sizes: str, bias: bool
) -> None:
    found = judged(own(model_of("scales", sizes, bias)), Ledger([ENTRY]))
    assert ENTRY.id not in explained(found)
    assert CHANGED_IN_PLACE in {verdict.why for verdict in found.verdicts}


def test_what_no_version_counter_knows_of_is_not_this(own: Callable[..., str]) -> None:
    found = judged(own(model_of("by_data")), Ledger([ENTRY]))
    assert found.causes and not found.known


@pytest.mark.parametrize("write", ["scales_a_copy", "scaled"])
def test_a_model_that_writes_nothing_into_a_product_is_clean(
    own: Callable[..., str], write: str
) -> None:
    named = own(model_of(write))
    assert not judged(named, Ledger([])).causes
    with cure():
        assert not judged(named, Ledger([])).causes


def changed(name: str, change: Callable[[Any], Any]) -> AbstractContextManager[object]:
    """A function of a kept product returns something else."""
    home: Any = checkpoint
    owner = home._VersionWrapper if name == "get_val" else home
    return attribute_replaced(owner, name, lambda usual: lambda *args: change(usual(*args)))


@contextmanager
def kept_as_another() -> Iterator[None]:
    """The cache keeps each product with its first two rows exchanged."""
    with changed("_detach_helper", lambda x: x.roll(1, 0) if x.dim() == 2 else x):
        yield


@contextmanager
def returned_as_another() -> Iterator[None]:
    """The cache hands out each product half again as large as it was kept."""
    with changed("get_val", lambda x: x * 1.5):
        yield


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", [kept_as_another, returned_as_another])
@pytest.mark.parametrize("write", ["scales", "attends", "scaled"])
def test_another_fault_of_the_cache_is_reported(
    own: Callable[..., str], fault: Callable[[], AbstractContextManager[None]], write: str
) -> None:
    named = own(model_of(write))
    with fault():
        found = judged(named, Ledger([ENTRY]))
    assert found.causes and not found.known


def gradient(write: Callable[[torch.Tensor], torch.Tensor], **how: Any) -> torch.Tensor:
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(8, 8, bias=False), torch.randn(2, 3, 8, requires_grad=True)
    y = checkpoint.checkpoint(lambda x: write(linear(x)).sin(), x, use_reentrant=False, **how)
    return torch.autograd.grad(y.sum(), x)[0]


def keep_mm() -> Any:
    return checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


def test_the_cure_gives_the_gradients_of_a_checkpoint_that_keeps_nothing() -> None:
    home: Any = checkpoint
    usual = home._CachingTorchDispatchMode.__torch_dispatch__
    wanted = gradient(lambda y: y.mul_(2))
    assert not torch.equal(gradient(lambda y: y.mul_(2), context_fn=keep_mm), wanted)
    with cure():
        assert torch.equal(gradient(lambda y: y.mul_(2), context_fn=keep_mm), wanted)
    assert home._CachingTorchDispatchMode.__torch_dispatch__ is usual


def test_a_view_that_is_none_has_a_version_counter_of_its_own() -> None:
    product = torch.ones(2, 3) @ torch.ones(3, 4)
    view = torch.ops.aten._unsafe_view(product, [1, 2, 4])
    view *= 2
    assert view.data_ptr() == product.data_ptr() and product.max() == 6
    assert (view._version, product._version) == (1, 0)
