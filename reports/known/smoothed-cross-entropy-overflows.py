"""torch.nn.functional.cross_entropy of fp16 with label smoothing overflows in a sum that it divides afterwards.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
logits, target = torch.randn(64, 1000).half(), torch.randint(1000, (64,))
loss = torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.1)
right = torch.nn.functional.cross_entropy(logits.double(), target, label_smoothing=0.1)
print(f"loss of 64 rows of 1,000 classes in fp16: {loss.item()}, in fp64: {right.item():.3f}")
sys.exit(not loss.isfinite())
