import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

keys, target = torch.randn(2, 2, 4, 8), torch.randn(2, 2, 8, 4)
losses = {
    "gelu": lambda x: (F.gelu(x) @ keys).sum(),
    "elu": lambda x: (F.elu(x) @ keys).sum(),
    "softplus": lambda x: (F.softplus(x) @ keys).sum(),
    "mse_loss": lambda x: F.mse_loss(x, target),
}
for name, loss in losses.items():
    x = torch.randn(2, 8, 8, requires_grad=True)
    compiled = torch.compile(lambda x: loss(x.view(2, 8, 2, 4).transpose(1, 2)), backend="aot_eager")
    try:
        compiled(x).backward()
        print(f"{name}: ok")
    except RuntimeError as error:
        print(f"{name}: {str(error).split(' (')[0]}")
grad, x = torch.randn(2, 2, 8, 4), torch.randn(2, 8, 2, 4).transpose(1, 2)
backward = lambda grad, x: torch.ops.aten.elu_backward(grad, 1, 1, 1, False, x).stride()
with FakeTensorMode() as mode:
    fake = backward(mode.from_tensor(grad), mode.from_tensor(x))
print(f"elu_backward: strides {backward(grad, x)}, fake {fake}")
