"""What watch sees inside a training: phases, modules, compiled graphs, quantised linears; and that
no number, dtype or graph is another for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import narrowfuzz
import pytest
import torch
from narrowfuzz.trace.address import parse
from narrowfuzz_watch.against import divergence
from narrowfuzz_watch.read import read
from narrowfuzz_watch.records import Report
from narrowfuzz_watch.scratch import Scratch
from torch import nn
from torch._dynamo.utils import guard_failures
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Attention is left out: a linear, a norm, dropout, a linear."""

    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(32, 64), nn.RMSNorm(64), nn.SiLU(), nn.Dropout(0.1), nn.Linear(64, 32)
        )
        self.recomputed = recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputed:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)


Change = Callable[[nn.Module], nn.Module]


def trained(change: Change = lambda model: model, recomputed: bool = False) -> list[str]:
    """Losses of four steps in hex, and the generator's state at the end."""
    torch.manual_seed(0)
    model = change(nn.Sequential(Block(recomputed), Block(recomputed)).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(4):
        x = torch.randn(16, 32, dtype=torch.bfloat16)
        loss = (model(x) - 1).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item().hex())
    return [*found, str(torch.randn(1).item())]


def quantised(model: nn.Module) -> nn.Module:
    float8 = pytest.importorskip("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name("rowwise")
    converted: nn.Module = float8.convert_to_float8_training(model, config=config)
    return converted


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("change", [lambda model: model, quantised], ids=["plain", "float8"])
def test_nothing_is_changed_and_a_clean_training_is_silent(
    tmp_path: Path, change: Change, recomputed: bool
) -> None:
    plain = trained(change, recomputed)
    for full in (False, True):
        with narrowfuzz.watch(tmp_path / str(full), full=full) as watched:
            assert trained(change, recomputed) == plain
        report = watched.report
        assert report is not None and (report.first, report.steps, report.ranks) == (None, 4, (0,))


class Once(TorchDispatchMode):
    """NaN in the output of an operator, where the condition holds for the first time; or always."""

    def __init__(self, operator: str, when: Callable[[], bool], always: bool = False) -> None:
        super().__init__()
        self.operator, self.when, self.always, self.done = operator, when, always, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if str(func) == self.operator and (self.always or not self.done) and self.when():
            self.done = True
            (out if isinstance(out, torch.Tensor) else args[0]).view(-1)[0] = float("nan")
        return out


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("operator", "when", "recomputed", "phase", "layer"),
    [
        ("aten.silu.default", lambda: True, False, "forward", "0.inner.2"),
        ("aten.silu.default", in_backward, True, "recompute", "1.inner.2"),
        ("aten.silu_backward.default", lambda: True, False, "backward", "1.inner.2"),
        ("aten.mm.default", in_backward, False, "backward", "1.inner.4"),
        ("aten.lerp_.Scalar", lambda: True, False, "optimizer", ""),
    ],
    ids=["forward", "recompute", "backward", "gemm", "optimizer"],
)
@pytest.mark.parametrize("always", [False, True], ids=["once", "always"])
def test_the_operator_is_named_with_its_phase_and_module(
    tmp_path: Path, operator: str, when: Any, recomputed: bool, phase: str, layer: str, always: bool
) -> None:
    with Once(operator, when, always), narrowfuzz.watch(tmp_path) as watched:
        trained(recomputed=recomputed)
    first = found(watched.report)
    at = first.at
    assert (at.name, at.phase, at.layer, at.event, first.bad) == (
        operator.removesuffix(".default"), phase, layer, 1, "nan",
    )  # fmt: skip
    assert first.cause == ("software or data" if always else "hardware or race")
    assert parse(str(at)) == at
    assert all(operand.state == "ok" for operand in first.operands)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_an_operator_that_takes_functions_runs_and_is_named(tmp_path: Path) -> None:
    """flex attention: a mode sees its call, and none of the kernels that it is made of."""
    from torch.nn.attention.flex_attention import flex_attention

    x = torch.randn(1, 2, 8, 16)
    with torch.no_grad(), narrowfuzz.watch(tmp_path) as watched:
        flex_attention(x, x, x)
        flex_attention(x, x, x, score_mod=lambda score, *place: score * float("nan"))
    assert found(watched.report).at.name == "flex_attention"


def test_what_is_written_over_is_copied_into_the_same_memory() -> None:
    scratch = Scratch(1024)
    turned, gaps, large = torch.randn(4, 8).t(), torch.randn(8, 8)[:, :3], torch.randn(512)
    given = [turned, torch.tensor(2.0).bfloat16(), gaps, large]
    copies = scratch.copies(given)
    for tensor in given:
        copy = copies[id(tensor)]
        assert copy.dtype == tensor.dtype and torch.equal(copy, tensor)
    places = [copies[id(tensor)].untyped_storage().data_ptr() for tensor in given]
    assert places[0] == places[1] and len({*places}) == 3  # gaps and large lie elsewhere
    assert copies[id(turned)].stride() == turned.stride()
    with torch.inference_mode():
        later = scratch.copies([turned + 1])
    assert torch.equal(copies[id(turned)], turned + 1) and later


def found(report: Report | None) -> Any:
    assert report is not None and report.first is not None and report.counts
    return report.first


def test_a_mask_of_infinities_is_no_finding(tmp_path: Path) -> None:
    x = torch.randn(4, 8, 8, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.1)
    with narrowfuzz.watch(tmp_path) as watched:
        for mask in (
            torch.full((8, 8), float("-inf")).triu(1),
            torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1) > 0, float("-inf")),
            torch.where(torch.ones(8, 8).triu(1) > 0, torch.tensor(float("-inf")), 0.0),
        ):
            (x + mask).softmax(-1).square().sum().backward()
            optimizer.step()
    assert watched.report is not None and watched.report.first is None


def test_an_infinity_that_reaches_no_gradient_is_told_and_does_not_count(tmp_path: Path) -> None:
    x = torch.zeros(4, requires_grad=True)
    with narrowfuzz.watch(tmp_path) as watched:
        (1 / (x.detach() + 0)).reciprocal().add(x).sum().backward()
        torch.optim.SGD([x], lr=0.1).step()
    report = watched.report
    assert report is not None and report.first is not None and not report.counts
    assert report.first.at.name == "aten.reciprocal" and not report.found


def test_memory_that_nothing_wrote_is_named_as_that(tmp_path: Path) -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with narrowfuzz.watch(tmp_path) as watched:
        rows = torch.empty(4, 4)
        with torch.no_grad():
            rows.view(torch.int32).fill_(-1)  # NaN, as fresh memory may hold it
            rows[:2].copy_(torch.ones(2, 4))
        (rows @ weight).sum().backward()
        optimizer.step()
    assert "never written as a whole" in found(watched.report).because


def graphs(compiled: Callable[..., Any], seen: list[str]) -> Any:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        seen.append(graph.code)
        return aot_eager(graph, inputs)

    return torch.compile(compiled, fullgraph=True, backend=backend)


def test_a_compiled_model_is_compiled_as_without(tmp_path: Path) -> None:
    seen: list[str] = []
    plain = trained(lambda model: graphs(model, seen))
    torch._dynamo.reset()
    alone, seen = seen, []
    with narrowfuzz.watch(tmp_path) as watched:
        assert trained(lambda model: graphs(model, seen)) == plain
    assert seen == alone and len(seen) == 1, [*guard_failures.values()]  # why it compiled again
    assert watched.report is not None and watched.report.steps == 4


def test_between_compiled_graphs_nothing_of_watch_is_compiled(tmp_path: Path) -> None:
    sizes: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        sizes.append(len(graph.graph.nodes))
        return graph

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        at = torch.nonzero(y)  # runs between two graphs
        return y[at[0]].sum()

    def run() -> list[int]:
        torch._dynamo.reset()
        sizes.clear()
        compiled = torch.compile(broken, backend=backend)
        for _ in range(2):
            compiled(torch.ones(8))
        return list(sizes)

    alone = run()
    with narrowfuzz.watch(tmp_path):
        assert run() == alone, [*guard_failures.values()]
    assert len(alone) > 1


def test_of_a_compiled_graph_it_is_said_that_its_inside_is_not_seen(tmp_path: Path) -> None:
    class CompiledFunction(torch.autograd.Function):
        """What a compiled graph is to autograd."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(x)
            out.detach().numpy()[...] = float("nan")  # no operator makes it
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    x = torch.ones(3, requires_grad=True)
    with narrowfuzz.watch(tmp_path) as watched:
        (CompiledFunction.apply(x) * 2).sum().backward()
        torch.optim.SGD([x], lr=0.1).step()
    first = found(watched.report)
    assert (first.made, first.cause) == ("given", "not seen")
    assert first.operands[0].maker == "CompiledFunctionBackward"


def test_two_runs_part_at_the_operator_that_flipped_a_low_bit(tmp_path: Path) -> None:
    class Flip(Once):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if str(func) == self.operator and not self.done and self.when():
                self.done = True
                out.view(torch.int16)[0, 0] ^= 1
            return out

    with narrowfuzz.watch(tmp_path / "clean", full=True):
        trained()
    flip = Flip("aten.silu_backward.default", in_backward)
    with flip, narrowfuzz.watch(tmp_path / "run", against=tmp_path / "clean") as watched:
        trained()
    assert watched.report is not None and watched.report.first is None
    found = watched.report.divergence
    assert found is not None
    assert (found.at.name, found.at.layer, found.at.event) == (
        "aten.silu_backward", "1.inner.2", 1,
    )  # fmt: skip
    assert found.because.startswith("of the same operands, bit for bit")
    assert divergence(read(tmp_path / "clean"), read(tmp_path / "clean")) is None
    with narrowfuzz.watch(tmp_path / "short"):
        pass
    with pytest.raises(ValueError, match="no digests: record it with --full"):
        divergence(read(tmp_path / "clean"), read(tmp_path / "short"))


def test_a_block_inside_a_block_is_refused(tmp_path: Path) -> None:
    with (
        narrowfuzz.watch(tmp_path / "a"),
        pytest.raises(ValueError, match="this thread is watched already"),
        narrowfuzz.watch(tmp_path / "b"),
    ):
        pass
