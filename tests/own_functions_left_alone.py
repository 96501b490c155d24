"""``autograd.Function``s whose backward may be meant, or of which float64 says nothing."""

import torch
from own_functions_right import Product
from torch.autograd import Function


def straight(forward, backward=lambda ctx, g: g):
    """A Function of one argument with this forward, whose backward passes the gradient through, or
    what ``backward`` makes of it."""
    return type("Straight", (Function,), {
        "forward": staticmethod(lambda ctx, x: forward(x)), "backward": staticmethod(backward),
        "__module__": __name__,
    })  # fmt: skip


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
