"""torch.utils.checkpoint: the recompute changes a buffer once more, a BatchNorm's statistics or what a router counts.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)


class Counts(nn.Module):
    """Which of four experts a token goes to, counted as routers do."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("tokens", torch.zeros(4))

    def forward(self, x):
        scores = self.gate(x)
        with torch.no_grad():
            self.tokens += torch.bincount(scores.argmax(-1), minlength=4)
        return self.experts(scores.softmax(-1))


bad = 0
for name, make, what in (
    ("a router that counts", Counts, lambda m: int(m.tokens.sum())),
    ("BatchNorm1d", lambda: nn.BatchNorm1d(8), lambda m: int(m.num_batches_tracked)),
):
    seen = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        model, x = make(), torch.randn(16, 8, requires_grad=True)
        y = checkpoint(model, x, use_reentrant=False) if recomputed else model(x)
        y.sum().backward()
        seen.append(what(model))
    print(f"{name}: after one step {seen[0]}, with checkpointing {seen[1]}")
    bad += seen[0] != seen[1]
sys.exit(bool(bad))
