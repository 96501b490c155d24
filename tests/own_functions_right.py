"""``autograd.Function``s whose backward is the derivative of their forward."""

import math

import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class SwiGLU(Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, g):
        gate, up = ctx.saved_tensors
        s = gate.sigmoid()
        return SwiGLU.gradients(g, gate, up, s)

    @staticmethod
    def gradients(g, gate, up, s):
        return g * up * (s + gate * s * (1 - s)), g * gate * s


class Linear(Function):
    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return x @ w.t() + b

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.flatten(0, -2).t() @ x.flatten(0, -2), g.flatten(0, -2).sum(0)


class Norm(Function):
    """RMSNorm in fp32, as most are."""

    @staticmethod
    def forward(ctx, x, w):
        r = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, w, r)
        return (x.float() * r).to(x.dtype) * w

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, w, r = ctx.saved_tensors
        hat, gw = x.float() * r, (g * w).float()
        grad = r * (gw - hat * (gw * hat).mean(-1, keepdim=True))
        return grad.to(x.dtype), (g * hat).flatten(0, -2).sum(0).to(w.dtype)


class Attention(Function):
    """The second result is there to be saved; its gradient is dropped."""

    @staticmethod
    def forward(ctx, q, k, v):
        s = (q @ k.mT) / math.sqrt(q.shape[-1])
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
        ctx.save_for_backward(q, k, v, p := s.softmax(-1))
        return p @ v, s.logsumexp(-1)

    @staticmethod
    def backward(ctx, g, _):
        q, k, v, p = ctx.saved_tensors
        dp = g @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        return ds @ k, ds.mT @ q, p.mT @ g


class Rope(Function):
    @staticmethod
    def forward(ctx, x, f):
        ctx.save_for_backward(f)
        return x * f

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].conj(), None


class CrossEntropy(Function):
    """Writes the gradient into the logits, as fused ones do."""

    @staticmethod
    def forward(ctx, x, t):
        p = x.softmax(-1)
        loss = -p.gather(-1, t[..., None]).log().mean()
        x.copy_((p - F.one_hot(t, p.shape[-1])) / t.numel())
        ctx.save_for_backward(x.detach())
        return loss

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0] * g, None


class Relu(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx, g):
        return g * (ctx.saved_tensors[0] > 0)


class Largest(Function):
    @staticmethod
    def forward(ctx, x):
        y, i = x.max(-1)
        ctx.save_for_backward(i)
        ctx.many = x.shape[-1]
        ctx.mark_non_differentiable(i)
        return y, i

    @staticmethod
    def backward(ctx, g, _):
        return F.one_hot(ctx.saved_tensors[0], ctx.many).to(g.dtype) * g.unsqueeze(-1)


class InPlace(Function):
    @staticmethod
    def forward(ctx, x):
        x.exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


class WithSetup(Function):
    @staticmethod
    def forward(x, none, by=3):
        return x**by, by

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.by = inputs[2]

    @staticmethod
    def backward(ctx, g, _):
        return ctx.by * ctx.saved_tensors[0] ** (ctx.by - 1) * g, None, None


class Dropped(Function):
    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(kept := (torch.rand_like(x) > p).to(x.dtype) / (1 - p))
        return x * kept

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


class Product(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b, g * a


def made(backward):
    """A tanh, whose class is one of its own each time."""

    class Made(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(y := x.tanh())
            return y

        @staticmethod
        def backward(ctx, g):
            return backward(g, *ctx.saved_tensors)

    return Made


class Root(Function):
    """Of numbers that may not be negative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(y := x.sqrt())
        return y

    @staticmethod
    def backward(ctx, g):
        return g / (2 * ctx.saved_tensors[0])


class LogDet(Function):
    """Of symmetric matrices: it reads one triangle, and its gradient is symmetric."""

    @staticmethod
    def forward(ctx, a):
        factor = torch.linalg.cholesky(a)
        ctx.save_for_backward(factor)
        return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @staticmethod
    def backward(ctx, g):
        return g[..., None, None] * torch.cholesky_inverse(ctx.saved_tensors[0])
