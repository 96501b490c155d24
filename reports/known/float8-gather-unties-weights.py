"""enable_fsdp_float8_all_gather: convert_to_float8_training unties tied weights.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))


torch.set_num_threads(1)
bad, grads = 0, []
for gathers in (False, True):
    torch.manual_seed(0)
    model = Tied()
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, emulate=True))
    tied = model.head.weight is model.embedding.weight
    names = [name for name, _ in model.named_parameters()]
    y = model(torch.randint(0, 64, (128,)))
    y.backward(torch.randn_like(y))
    grads.append(model.embedding.weight.grad)
    print(f"float8 all-gather={gathers}: tied after conversion: {tied}, parameters {names}")
    bad += gathers and not tied
error = ((grads[1] - grads[0]).norm() / grads[0].norm()).item()
print(f"the shared weight's gradient is off by {error:.2f} of its norm")
sys.exit(bool(bad))
