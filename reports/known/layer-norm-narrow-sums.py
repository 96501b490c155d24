"""LayerNorm on a CPU sums the gradients of its weight and bias in the dtype of its input, bf16 or fp16.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.nn.functional as F

torch.set_num_threads(1)


def gradients(rows, dtype, parameters):
    """Of 16 features, for output gradients of ones: the exact gradient of the bias is the number of rows."""
    torch.manual_seed(0)
    x = torch.randn(rows, 16).to(dtype)
    weight = torch.ones(16, dtype=parameters, requires_grad=True)
    bias = torch.zeros(16, dtype=parameters, requires_grad=True)
    F.layer_norm(x, (16,), weight, bias).backward(torch.ones(rows, 16, dtype=dtype))
    exact = F.layer_norm(x.double(), (16,)).sum(0)
    return bias.grad[0].item(), (weight.grad.double() - exact).norm().item() / exact.norm().item()


bad = 0
for dtype, parameters in (
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16), (torch.float16, torch.float32),
):
    got, off = gradients(4096, dtype, parameters)
    print(f"input {dtype}, parameters {parameters}: gradient of the bias {got} (exact: 4096.0); "
          f"gradient of the weight off by {off:.2%} of its norm")
    bad += got != 4096.0
with torch.autocast("cpu", torch.bfloat16):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    y = model(torch.randn(8192, 64))
y.backward(torch.ones_like(y))
print(f"under autocast, 8192 rows: gradient of the bias {model[1].bias.grad[0].item()} (exact: 8192.0)")
sys.exit(bool(bad))
