import torch
from torch import nn

torch.manual_seed(0)
norm, linear = nn.RMSNorm(64), nn.Linear(64, 64, bias=False)
x = torch.randn(64, 192).t()
grad_output = torch.randn(192, 64)


def block(x):
    return x + linear(norm(x))


def grad_input(run):
    leaf = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = run(leaf)
    y.backward(grad_output)
    return leaf.grad


expected, actual = grad_input(block), grad_input(torch.compile(block))
wrong = ~((actual - expected).abs() <= 0.01 * expected.abs().max())
print(f"{wrong.sum()} of {wrong.numel()} gradients are wrong, {actual.isnan().sum()} of them NaN")
