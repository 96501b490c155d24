"""AdamW8bit and AdamWFp8 of torchao take far larger steps than Adam can where they keep a second moment as 0.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torchao.optim

torch.set_num_threads(1)
torch.compiler.set_stance("force_eager")  # each step is compiled otherwise, for ten seconds; the numbers are the same
bad = 0
for kind in (torch.optim.AdamW, torchao.optim.AdamW8bit, torchao.optim.AdamW4bit, torchao.optim.AdamWFp8):
    p = torch.nn.Parameter(torch.zeros(64, 128))
    optimizer, steps = kind([p], lr=1e-3, weight_decay=0.0), []
    for small in (1e-4, 0.0):  # odd columns have a small gradient, and then none; even ones have 1
        p.grad, before = torch.ones(64, 128), p.detach().clone()
        p.grad[:, 1::2] = small
        optimizer.step()
        steps.append((p.detach() - before)[:, 1::2].abs().max().item() / 1e-3)
    print(f"{kind.__name__}: steps of {steps[0]:.3g} and {steps[1]:.3g} learning rates")
    bad += steps[1] > 8.0
sys.exit(bool(bad))
