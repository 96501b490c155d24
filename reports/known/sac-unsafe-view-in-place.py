"""Selective checkpointing that keeps aten.mm: what is written in place into the output of a linear without a bias.

Of a 2-D input it raises, as documented; of a 3-D input nothing is noticed, and gradients are wrong.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

torch.set_num_threads(1)
torch.manual_seed(0)
aten = torch.ops.aten
KEEP = partial(create_selective_checkpoint_contexts, [aten.mm.default, aten.addmm.default])
WRITES = {
    "y *= 2": lambda y: y.mul_(2),
    "dropout(inplace=True)": nn.Dropout(0.5, inplace=True),
    "y * 2": lambda y: y * 2,
}


def gradients(function, linear, x, **how):
    linear.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    checkpoint(function, x, use_reentrant=False, **how).sum().backward()
    return [x.grad, *(p.grad for p in linear.parameters())]


def off(one, other):
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(one, other))


bad = 0
for bias in (False, True):
    for shape in ((6, 8), (2, 3, 8), (1, 2, 3, 8)):
        for name, write in WRITES.items():
            linear, x = nn.Linear(8, 8, bias=bias), torch.randn(shape)
            function = lambda x: torch.sin(write(linear(x)))
            wanted = gradients(function, linear, x)  # everything is recomputed
            try:
                error = off(gradients(function, linear, x, context_fn=KEEP), wanted)
                said = f"gradients are off by {error:.2g} of their norm"
                bad += error > 1e-3
            except RuntimeError as raised:
                said = str(raised)
            print(f"bias {bias!s:5}  input {len(shape)}-D  {name:21}  {said}")

y = aten.mm(torch.ones(2, 2), torch.ones(2, 2))
view = aten._unsafe_view(y, [1, 2, 2])
view *= 2
print("written through _unsafe_view:", y[0, 0].item(), "version of what it is a view of:", y._version)
sys.exit(bool(bad))
