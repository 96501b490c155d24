"""Models of users with ``autograd.Function``s of their own: wrong ones, right ones, and ones whose
backward is meant to be another than the derivative, or that float64 says nothing of."""

import math

import torch
import torch.nn.functional as F
from torch import nn
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


def swiglu(change):
    """A SwiGLU whose backward returns ``change`` of (g, gate, up, s)."""

    class Changed(SwiGLU):
        @staticmethod
        def backward(ctx, g):
            gate, up = ctx.saved_tensors
            return change(g, gate, up, gate.sigmoid())

    return Changed


MissingTerm = swiglu(lambda g, gate, up, s: (g * up * s, g * gate * s))
WrongSign = swiglu(lambda g, gate, up, s: (g * up * (s - gate * s * (1 - s)), g * gate * s))
Swapped = swiglu(lambda *given: SwiGLU.gradients(*given)[::-1])
Doubled = swiglu(lambda *given: (SwiGLU.gradients(*given)[0], 2 * SwiGLU.gradients(*given)[1]))


class Linear(Function):
    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return x @ w.t() + b

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.flatten(0, -2).t() @ x.flatten(0, -2), g.flatten(0, -2).sum(0)


class Transposed(Linear):
    @staticmethod
    def backward(ctx, g):
        _, w = ctx.saved_tensors
        return g @ w.t(), *Linear.backward(ctx, g)[1:]


class NoSum(Linear):
    """Of the bias gradient, which is a sum over tokens, one token's."""

    @staticmethod
    def backward(ctx, g):
        return *Linear.backward(ctx, g)[:2], g.flatten(0, -2)[0]


class Stale(Linear):
    kept = None

    @staticmethod
    def forward(ctx, x, w, b):
        if Stale.kept is None:
            Stale.kept = w.detach().double()
        return Linear.forward(ctx, x, w, b)

    @staticmethod
    def backward(ctx, g):
        return g @ Stale.kept.to(g.dtype), *Linear.backward(ctx, g)[1:]


class LastRow(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(y := x.tanh())
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        grad = g * (1 - y * y)
        grad[..., -1, :] *= 0.5
        return grad


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


class NormOfConstant(Norm):
    """As if the mean square were no function of x."""

    @staticmethod
    def backward(ctx, g):
        x, w, r = ctx.saved_tensors
        return r.to(x.dtype) * g * w, Norm.backward(ctx, g)[1]


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


class Unscaled(Attention):
    @staticmethod
    def backward(ctx, g, _):
        q, k, v = Attention.backward(ctx, g, _)
        scale = math.sqrt(ctx.saved_tensors[0].shape[-1])
        return q * scale, k * scale, v


class Rope(Function):
    @staticmethod
    def forward(ctx, x, f):
        ctx.save_for_backward(f)
        return x * f

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].conj(), None


class RopeForward(Rope):
    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


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


class SumForMean(CrossEntropy):
    @staticmethod
    def backward(ctx, g):
        (grad,) = ctx.saved_tensors
        return grad * g * grad.shape[0] * grad.shape[1], None


class Relu(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx, g):
        return g * (ctx.saved_tensors[0] > 0)


class Squared(Relu):
    @staticmethod
    def forward(ctx, x):
        return Relu.forward(ctx, x).square()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].relu()  # half of it


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


def straight(forward, backward=lambda ctx, g: g):
    """A Function of one argument with this forward, whose backward passes the gradient through, or
    what ``backward`` makes of it."""
    return type("Straight", (Function,), {
        "forward": staticmethod(lambda ctx, x: forward(x)), "backward": staticmethod(backward),
        "__module__": __name__,
    })  # fmt: skip


def clamped(bound, change):
    """A clamp whose backward is ``change`` of the gradient and of where nothing was clamped."""

    class Clamped(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clamp(-bound, bound)

        @staticmethod
        def backward(ctx, g):
            return change(g, ctx.saved_tensors[0].abs() <= bound)

    return Clamped


def neuron(change):
    """A membrane's next potential, and whether it spikes, which takes a potential of 99; backward
    is ``change`` of both gradients and of the potential."""

    class Neuron(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return 0.9 * x + x.sin(), (x > 99).to(x.dtype)

        @staticmethod
        def backward(ctx, g, spiked):
            (x,) = ctx.saved_tensors
            return change(g, spiked, x) + g * x.cos()

    return Neuron


def grid(x, levels, dim=None):
    """Rounded to a grid that its largest magnitude makes."""
    scale = (x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)) / levels
    return (x / scale).round() * scale


def fp8(x):
    scale = x.abs().amax() / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def ternary(x):
    scale = x.abs().mean()
    return (x / scale).round().clamp(-1, 1) * scale


def rounded_linear(of_x, of_w):
    """x W^T of rounded operands, with the gradients of unrounded ones."""

    class Rounded(Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return (of_x(x) @ of_w(w).t()).to(x.dtype)

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w, g.flatten(0, -2).t() @ x.flatten(0, -2)

    return Rounded


def as_is(x):
    return x


class LearnedStep(Function):
    """LSQ: the step has a gradient of its own making."""

    @staticmethod
    def forward(ctx, x, s):
        ctx.save_for_backward(x, s)
        return (x / s).round().clamp(-8, 7) * s

    @staticmethod
    def backward(ctx, g):
        x, s = ctx.saved_tensors
        q = x / s
        inside = (q >= -8) & (q <= 7)
        return g * inside, (g * torch.where(inside, q.round() - q, q.clamp(-8, 7))).sum()


class AuxiliaryLoss(Function):
    """As a router's: the loss gets a gradient, the output does not know of it."""

    @staticmethod
    def forward(ctx, y, loss):
        ctx.save_for_backward(loss)
        return y

    @staticmethod
    def backward(ctx, g):
        return g, torch.full_like(ctx.saved_tensors[0], 0.01)


class ScaledForward(Function):
    @staticmethod
    def forward(ctx, x, by):
        return x * by

    @staticmethod
    def backward(ctx, g):
        return g, None


class RoundedGradient(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        return fp8(g) @ ctx.saved_tensors[0], None


class GivenStatistics(Function):
    """Its backward is that of the norm, whose statistics it is given."""

    @staticmethod
    def forward(ctx, x, r):
        ctx.save_for_backward(x, r)
        return x * r

    @staticmethod
    def backward(ctx, g):
        x, r = ctx.saved_tensors
        return r * (g - x * r * (g * x * r).mean(-1, keepdim=True)), None


class Peak(Function):
    """Keeps a moving maximum."""

    peak = torch.ones(())

    @staticmethod
    def forward(ctx, x):
        Peak.peak = 0.9 * Peak.peak + 0.1 * x.detach().abs().max().float()
        ctx.save_for_backward(Peak.peak)
        return x / Peak.peak

    @staticmethod
    def backward(ctx, g):
        return g / ctx.saved_tensors[0]


class OfLayer(Function):
    """Rounds the weight of a layer that it is handed as such."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x @ fp8(layer.weight.detach().to(x.dtype)).t()

    @staticmethod
    def backward(ctx, g):
        return g @ ctx.layer.weight.detach().to(g.dtype), None


class NoFloat64(Function):
    @staticmethod
    def forward(ctx, x):
        if x.dtype == torch.float64:
            raise NotImplementedError("no kernel for float64")
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class LeftOut(Product):
    @staticmethod
    def backward(ctx, g):
        return Product.backward(ctx, g)[0], None


def rotated(function):
    def call(self, h):
        x = torch.view_as_complex(h.float().reshape(*h.shape[:-1], -1, 2).contiguous())
        by = torch.polar(torch.ones(x.shape[-1]), torch.arange(x.shape[-1]).float())
        return torch.view_as_real(function.apply(x, by)).reshape(h.shape).to(h.dtype)

    return call


def glu(function):
    apply = function.apply  # long before anybody looks
    return lambda self, h: apply(h, self.other(h))


def linear(function):
    return lambda self, h: function.apply(h, self.w, self.b)


def weighed(function):
    return lambda self, h: function.apply(h, self.w)


def alone(function, *more):
    return lambda self, h: function.apply(h, *more)


def loss(function):
    return lambda self, h: h + function.apply(h * 1, torch.zeros(h.shape[:-1], dtype=torch.long))


def attention(function):
    return lambda self, h: function.apply(h, self.other(h), h * 0.5)[0]


def given_statistics(self, h):
    with torch.no_grad():
        r = torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
    return GivenStatistics.apply(h, r)


def spread(self, h):
    return h @ h.mT + torch.eye(h.shape[-2], dtype=h.dtype) * 4


WRONG = {
    "missing term": glu(MissingTerm),
    "wrong sign": glu(WrongSign),
    "swapped": glu(Swapped),
    "factor 2": glu(Doubled),
    "transposed": linear(Transposed),
    "no broadcast sum": linear(NoSum),
    "stale": linear(Stale),
    "one row": alone(LastRow),
    "norm of a constant, in fp32": lambda self, h: NormOfConstant.apply(h, self.b),
    "attention's scale": attention(Unscaled),
    "complex": rotated(RopeForward),
    "sum for mean": loss(SumForMean),
    "half, with kinks": alone(Squared),
    "made in forward": lambda self, h: made(lambda g, y: g * (1 - y)).apply(h),
}
RIGHT = {
    "swiglu": glu(SwiGLU),
    "linear": linear(Linear),
    "norm in fp32": lambda self, h: Norm.apply(h, self.b),
    "attention": attention(Attention),
    "complex": rotated(Rope),
    "loss in place": loss(CrossEntropy),
    "relu": alone(Relu),
    "relu of zeros": lambda self, h: Relu.apply(h * 0),
    "largest": lambda self, h: h + Largest.apply(h)[0].unsqueeze(-1),
    "in place": lambda self, h: InPlace.apply(h * 0.5),
    "setup": lambda self, h: WithSetup.apply(h, None)[0],
    "dropout": alone(Dropped, 0.3),
    "twice the same": lambda self, h: Product.apply(h, h),
    "made in forward": lambda self, h: made(lambda g, y: g * (1 - y * y)).apply(h),
    "root": lambda self, h: Root.apply(h.square()),
    "symmetric": lambda self, h: h + LogDet.apply(spread(self, h.float()))[:, None, None].to(h),
}
LEFT = {
    "rounded to a grid": alone(straight(lambda x: grid(x, 7))),
    "a sign": alone(straight(torch.sign)),
    "a choice": alone(straight(lambda x: F.one_hot(x.argmax(-1), x.shape[-1]).to(x.dtype))),
    "stochastic": alone(straight(lambda x: torch.floor(x * 16 + torch.rand_like(x)) / 16)),
    "clamped": alone(straight(lambda x: x.clamp(-1, 1))),
    "half": alone(straight(lambda x: x.half().tanh().to(x.dtype))),
    "fp8": weighed(rounded_linear(fp8, fp8)),
    "bf16": weighed(rounded_linear(lambda x: x.bfloat16(), lambda w: w.bfloat16())),
    "int8 by row": weighed(rounded_linear(as_is, lambda w: grid(w, 127, 1))),
    "ternary": weighed(rounded_linear(as_is, ternary)),
    "frozen and rounded": lambda self, h: rounded_linear(as_is, ternary).apply(h, self.w.detach()),
    "learned step": lambda self, h: h @ LearnedStep.apply(self.w, self.s),
    "reversed": alone(straight(lambda x: x.view_as(x), lambda ctx, g: -g)),
    "clipped": alone(straight(torch.clone, lambda ctx, g: g.clamp(-0.1, 0.1))),
    "clipped of something": alone(straight(torch.exp, lambda ctx, g: g.clamp(-0.1, 0.1))),
    "auxiliary loss": lambda self, h: AuxiliaryLoss.apply(h, h.square().mean()),
    "scaled": alone(ScaledForward, 0.5),
    "rounded gradient": lambda self, h: RoundedGradient.apply(h, self.w.detach()),
    "given statistics": given_statistics,
    "moving maximum": alone(Peak),
    "a layer's own rounding": lambda self, h: OfLayer.apply(h, self.other),
    "no float64": alone(NoFloat64),
    "left out": lambda self, h: LeftOut.apply(h, self.b),
    "no gradient": lambda self, h: h + SwiGLU.apply(h.detach(), h.detach()),
}
EVERY = {
    f"{kind}: {name}": act
    for kind, acts in (("wrong", WRONG), ("right", RIGHT), ("left", LEFT))
    for name, act in acts.items()
}


class Model(nn.Module):
    def __init__(self, act, dim):
        super().__init__()
        self.first, self.other, self.last = (nn.Linear(dim, dim) for _ in range(3))
        self.w = nn.Parameter(torch.randn(dim, dim) / math.sqrt(dim))
        self.b, self.s = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.tensor(0.3))
        self.act = act

    def forward(self, x):
        return self.last(self.act(self, self.first(x)))


def build(name="right: swiglu"):
    torch.manual_seed(1)
    return Model(EVERY[name], 16), torch.zeros(2, 8, 16)
