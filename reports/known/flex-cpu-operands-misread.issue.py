import torch
from torch.nn.attention.flex_attention import flex_attention

torch.manual_seed(0)
q, k, v = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 16, 16), torch.randn(1, 2, 16, 16)
w = torch.randn(32, 32)
cases = {
    "q, k, v": (lambda q, k, v: flex_attention(q, k, v), q),
    "k[:, :, 8:], v[:, :, 8:]": (lambda q, k, v: flex_attention(q, k[:, :, 8:], v[:, :, 8:]), q),
    "2 * transposed": (lambda q, k, v: flex_attention(2 * q, k, v), q.mT.contiguous().mT),
    "(x @ w).view(1, 8, 2, 16).transpose(1, 2)": (
        lambda x, k, v: flex_attention((x @ w).view(1, 8, 2, 16).transpose(1, 2), k, v),
        torch.randn(1, 8, 32),
    ),
}
for name, (f, x) in cases.items():
    with torch.no_grad():
        try:
            error = (torch.compile(f)(x, k, v) - f(x, k, v)).abs().max().item()
            print(f"{name}: compiled is {'wrong' if error > 1e-3 else 'right'}")
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
