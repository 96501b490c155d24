"""Dynamo asserts on a float read inside two autograd.Functions with dynamic=True; eager runs."""

import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
import logging

import torch

logging.disable(logging.CRITICAL)
EPS = 1e-12


class Global(torch.autograd.Function):
    """Reads a module's global float, as a scale's lower bound is often written."""

    @staticmethod
    def forward(ctx, x):
        return x.clamp(min=EPS)

    @staticmethod
    def backward(ctx, g):
        return g


class Literal(Global):
    """The same with a literal."""

    @staticmethod
    def forward(ctx, x):
        return x.clamp(min=1e-12)


def once(x):
    return Global.apply(x)


def twice(x):
    return Global.apply(Global.apply(x))


def literal(x):
    return Literal.apply(Literal.apply(x))


bad = 0
for function, dynamic, backend in ((twice, True, "eager"), (twice, True, "aot_eager"),
                                   (twice, False, "eager"), (twice, None, "eager"),
                                   (once, True, "eager"), (literal, True, "eager")):
    torch._dynamo.reset()
    x = torch.ones(8, 4, requires_grad=True)
    function(x).sum().backward()  # eager is fine
    try:
        torch.compile(function, backend=backend, dynamic=dynamic)(x).sum().backward()
        shown = "runs"
    except Exception as error:
        shown = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        bad += "lift_tracked_freevar_to_input" in shown
    print(f"{function.__name__:7} dynamic={dynamic!s:5} {backend:9} {shown}")
sys.exit(bool(bad))
