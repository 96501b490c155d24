from functools import partial

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

save_mm = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
torch.manual_seed(0)
linear = torch.nn.Linear(8, 8, bias=False)


def block(x):
    y = linear(x)
    y *= 2
    return torch.sin(y)


for shape in ((6, 8), (2, 3, 8)):
    x = torch.randn(shape, requires_grad=True)
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    try:
        out = checkpoint(block, x, use_reentrant=False, context_fn=save_mm)
        (grad,) = torch.autograd.grad(out.sum(), x)
        print(f"{len(shape)}-D: x.grad is off by {(grad - expected).norm() / expected.norm():.0%}")
    except RuntimeError as error:
        print(f"{len(shape)}-D: {error}")
