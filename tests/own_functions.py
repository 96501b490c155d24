"""Models of users with ``autograd.Function``s of their own: wrong ones, right ones, and ones whose
backward is meant to be another than the derivative, or that float64 says nothing of."""

import math

import torch
import torch.nn.functional as F
from own_functions_left_alone import (
    AuxiliaryLoss,
    GivenStatistics,
    LearnedStep,
    LeftOut,
    NoFloat64,
    OfLayer,
    Peak,
    RoundedGradient,
    ScaledForward,
    as_is,
    fp8,
    grid,
    rounded_linear,
    straight,
    ternary,
)
from own_functions_right import (
    Attention,
    CrossEntropy,
    Dropped,
    InPlace,
    Largest,
    Linear,
    LogDet,
    Norm,
    Product,
    Relu,
    Root,
    Rope,
    SwiGLU,
    WithSetup,
    made,
)
from own_functions_wrong import (
    Doubled,
    LastRow,
    MissingTerm,
    NormOfConstant,
    NoSum,
    RopeForward,
    Squared,
    Stale,
    SumForMean,
    Swapped,
    Transposed,
    Unscaled,
    WrongSign,
)
from torch import nn
from torch.autograd import Function


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
