"""torch.compile: the second derivative of a compiled model raises, as its message says; eager has it."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Linear(64, 32)
raised = {}
for name, call in {"eager": model, "aot_eager": torch.compile(model, backend="aot_eager")}.items():
    x = torch.randn(8, 64, requires_grad=True)
    y = call(x)
    g, = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    try:
        g.square().sum().backward()
        raised[name] = ""
    except RuntimeError as error:
        raised[name] = str(error)
    print(f"{name}: {raised[name] or 'second derivative is there'}")
sys.exit(not raised["eager"] and "does not currently support double backward" in raised["aot_eager"])
