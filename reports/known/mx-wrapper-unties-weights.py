"""quantize_(MXFP8TrainingOpConfig) and (Float8TrainingOpConfig) give a linear new parameters: tied weights are untied, gradient hooks and attributes are gone.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torchao.prototype.moe_training.config import Float8TrainingOpConfig, MXFP8TrainingOpConfig
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common import KernelPreference

config = MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED)
torch.set_num_threads(1)


def tied(convert, config=config):
    torch.manual_seed(0)
    model = nn.ModuleDict(dict(emb=nn.Embedding(64, 64), head=nn.Linear(64, 64, bias=False)))
    model.head.weight = model.emb.weight
    if convert:
        quantize_(model, config)
    return model


def moved(model, make):
    start, optimizer = model.emb.weight.detach().clone(), make(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model.head(model.emb(torch.arange(32))).pow(2).mean().backward()
        optimizer.step()
    return (model.emb.weight.detach() - start).norm().item()


plain, mx = tied(False), tied(True)
print("parameters:", len(list(plain.parameters())), "before,", len(list(mx.parameters())), "after")
print("head.weight is emb.weight:", mx.head.weight is mx.emb.weight)
for name, make in (("SGD, weight decay", lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.5)),
                   ("AdamW", lambda p: torch.optim.AdamW(p, 0.01))):
    print(f"{name}: 3 steps move the weight by {moved(tied(False), make):.2f} plain,"
          f" {moved(tied(True), make):.2f} converted")
model = tied(True).to(torch.bfloat16)
print("one memory after .to(bfloat16):",
      model.emb.weight.data_ptr() == model.head.weight._data.data_ptr())
linear = nn.Linear(64, 64)
linear.weight.register_hook(torch.zeros_like)  # freezes the weight
linear.weight.tensor_parallel = True
quantize_(linear, config)
linear(torch.randn(32, 64)).pow(2).sum().backward()
grad = linear.weight.grad
called = not getattr(grad, "_data", grad).any().item()
print("gradient hook called:", called, " attribute:", hasattr(linear.weight, "tensor_parallel"))
f8 = tied(True, Float8TrainingOpConfig())
print("Float8TrainingOpConfig: head.weight is emb.weight:", f8.head.weight is f8.emb.weight)
sys.exit(1 if mx.head.weight is not mx.emb.weight or not called else 0)
