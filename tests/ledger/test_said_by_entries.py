"""What entries of the ledger say of workarounds and of gradients, measured with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from narrowfuzz.ledger.ledger import load_entries
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ENTRIES = {entry.id: entry for entry in load_entries()}
ROWS = 4096


def of_bias(backend: str) -> float:
    """The gradient of a LayerNorm's bias for bf16 output gradients of ones."""
    weight, bias = (torch.ones(16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    x = torch.randn(ROWS, 16).bfloat16()
    norm: Any = torch.compile(lambda x, w, b: F.layer_norm(x, (16,), w, b), backend=backend)
    norm(x, weight, bias).sum().backward()
    assert bias.grad is not None
    return bias.grad[0].item()


def of_table(backend: str) -> float:
    """The gradient of one row of a bf16 embedding for output gradients of ones."""
    table = torch.ones(8, 16, dtype=torch.bfloat16, requires_grad=True)
    look_up: Any = torch.compile(lambda ids, table: F.embedding(ids, table), backend=backend)
    look_up(torch.zeros(ROWS, dtype=torch.long), table).sum().backward()
    assert table.grad is not None
    return table.grad[0, 0].item()


NARROW = {"layer-norm-narrow-sums": of_bias, "embedding-narrow-sums": of_table}


@pytest.mark.parametrize("entry", NARROW)
@pytest.mark.parametrize(
    ("backend", "helps"),
    [("aot_eager", False), pytest.param("inductor", True, marks=pytest.mark.heavy)],
)
def test_inductor_widens_narrow_sums_and_aot_eager_does_not(
    entry: str, backend: str, helps: bool
) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert NARROW[entry](backend) == (ROWS if helps else 256.0)
    finally:
        torch.set_num_threads(threads)
    assert ENTRIES[entry].workaround.endswith("torch.compile with backend inductor")


class Counting(nn.Module):
    """Counts its forwards, and may multiply by the count."""

    calls: torch.Tensor

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.weight, self.reads = nn.Parameter(torch.ones(())), reads
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.calls += 1
        return x * self.weight * (self.calls.clone() if self.reads else 1.0)


@pytest.mark.parametrize(("reads", "gradient"), [(False, 1.0), (True, 2.0)])
def test_gradients_are_right_unless_the_forward_reads_the_buffer_it_changes(
    reads: bool, gradient: float
) -> None:
    model = Counting(reads=reads)
    checkpoint(model, torch.ones(()), use_reentrant=False).backward()
    assert model.weight.grad is not None
    assert (model.calls.item(), model.weight.grad.item()) == (2.0, gradient)
    said = " ".join(ENTRIES["checkpoint-changes-buffers-twice"].explanation.split())
    assert "does not read the buffer that it changes, the gradients of that step are right" in said
    assert "does read it, the recompute computes something else, and the gradients" in said
