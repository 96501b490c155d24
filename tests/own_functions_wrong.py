"""``autograd.Function``s with a wrong backward, most of them right ones with one thing changed."""

import math

from own_functions_right import Attention, CrossEntropy, Linear, Norm, Relu, Rope, SwiGLU
from torch.autograd import Function


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


class NormOfConstant(Norm):
    """As if the mean square were no function of x."""

    @staticmethod
    def backward(ctx, g):
        x, w, r = ctx.saved_tensors
        return r.to(x.dtype) * g * w, Norm.backward(ctx, g)[1]


class Unscaled(Attention):
    @staticmethod
    def backward(ctx, g, _):
        q, k, v = Attention.backward(ctx, g, _)
        scale = math.sqrt(ctx.saved_tensors[0].shape[-1])
        return q * scale, k * scale, v


class RopeForward(Rope):
    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


class SumForMean(CrossEntropy):
    @staticmethod
    def backward(ctx, g):
        (grad,) = ctx.saved_tensors
        return grad * g * grad.shape[0] * grad.shape[1], None


class Squared(Relu):
    @staticmethod
    def forward(ctx, x):
        return Relu.forward(ctx, x).square()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].relu()  # half of it
