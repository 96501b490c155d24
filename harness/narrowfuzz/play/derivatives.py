"""The backward of a user's own ``torch.autograd.Function`` is the derivative of its forward: in
float64, against finite differences that bring their own error (``differences.py``).

A backward is called wrong only where it leaves that error many times over on every one of many
fresh gradients and directions, and where nothing says that it is meant so: see ``meant``.

A stand-alone script is written from this source.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from narrowfuzz.play.differences import (
    Slope,
    differences,
    drawn,
    moved,
    nonzero,
    size_of,
    slope_along,
    vector,
    way_from,
    with_argument,
)
from narrowfuzz.play.functions import (
    FunctionCall,
    backward_of,
    called_with,
    function_calls,
    in_float64,
    needing,
)

#: Of one argument of one Function: the module that called it, the slope by finite differences and
#: its error, what the backward gives along the same direction, by how much these may differ, all in
#: the worst direction; their root mean square difference as a share of the slopes, what that may
#: be, and of how many directions. ``why`` nothing can be said, or "".
Derivative = namedtuple(
    "Derivative", "function module argument why slope error backward allowed off share directions"
)
#: Arguments are tried so far beside what they were, a share of their root mean square: away from
#: kinks, from a grid that they were rounded to, and from what a backward may have kept of them.
BESIDE = 2.0**-4
#: Directions that are looked at, and fresh ones where those are not as they should be.
FEW, MANY = 2, 20
#: So many errors a slope may be off by: an estimate that moved by e from one step to the next,
#: a quarter as long, is a sixteenth of e off; in noise a few times e.
ERRORS = 64.0
#: What a backward may be off by at least, a share of the slope: it may round to bf16.
SHARE = 2.0**-7
#: A slope whose error is no smaller share of it tells nothing.
CLEAR = 2.0**-10
#: A smooth function is not so many times steeper over a finite step than over the smallest.
STEEP = 8.0
#: A single element is moved by this, and then by these, as shares of the root mean square.
LEAST, FAR = 2.0**-12, (0.25, -0.25, 1.0, -1.0, 4.0, -4.0, 16.0, -16.0)
#: Elements that are moved by themselves.
ELEMENTS = 48
#: Where an object is among the arguments, a backward may be off by this share.
HIDDEN = 0.25
#: More numbers in the arguments than these take too long.
LARGEST_CALL = 2**22


def derivatives(own: Any, ids: int) -> list[Derivative]:
    """Of every Function of a user's that a forward of this ``OwnModel`` calls, and every argument
    that it is asked the gradient of, once for each kind of call; ids: as ``function_calls``.

    Parameters are moved a little first: what begins as zeros hides what it is multiplied by.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in own.parameters():
                if parameter.is_floating_point():
                    noise = torch.randn(parameter.shape).to(parameter.device, parameter.dtype)
                    parameter.add_(noise, alpha=0.02)
        calls, others = (function_calls(own, ids, seed) for seed in (1, 2))
        kinds: set[Any] = set()
        found: list[Derivative] = []
        for i, call in enumerate(calls):
            if call.kind not in kinds and any(call.needs):
                kinds.add(call.kind)
                found += of_call(call, others[i] if len(others) == len(calls) else None)
    asked = {kind[0] for kind in kinds}
    idle = {c.name: c for c in calls if c.args and c.name not in asked}
    return found + [unsaid(c, 0, "it is asked for no gradient") for c in idle.values()]


def of_call(call: FunctionCall, other: FunctionCall | None) -> Iterator[Derivative]:
    """Of every argument that needs a gradient; ``other`` is the same call in another forward."""
    asked = [i for i, needs in enumerate(call.needs) if needs]
    try:
        wide = in_float64(call)
        values, why = point_of(wide)
        sent = {} if why else live_of(wide, values)
        if not (sent or why):
            why = "its backward gives no gradient of anything"
        if follows(call, other):
            why = why or "it is given numbers without a gradient that follow those with one"
        for i in asked:
            yield (unsaid(call, i, why) if why else of_argument(wide, values, sent, i))
    except Exception as error:  # noqa: BLE001 - it is a user's code, and what it raised is told
        lines = str(error).strip().splitlines() or [""]
        why = f"it does not run in float64: {type(error).__name__}: {lines[0][:200]}"
        yield from (unsaid(call, i, why) for i in asked)


def unsaid(call: FunctionCall, i: int, why: str) -> Derivative:
    """Nothing can be said of this argument."""
    nan = math.nan
    return Derivative(
        call.name, call.module, call.argument(i), why, nan, nan, nan, nan, nan, nan, 0
    )


def follows(call: FunctionCall, other: FunctionCall | None) -> bool:
    """True where floats that need no gradient differ from forward to forward: they may hang on what
    does, and the backward may be that of both. Without the other call nobody knows."""
    if other is None or other.name != call.name:
        return True
    for needs, mine, theirs in zip(call.needs, call.args, other.args, strict=False):
        if isinstance(mine, torch.Tensor):
            floats = mine.is_floating_point() or mine.is_complex()
            same = isinstance(theirs, torch.Tensor) and torch.equal(mine, theirs)
            if not needs and floats and not same:
                return True
        elif isinstance(mine, float) and mine != theirs:
            return True
    return False


def point_of(call: FunctionCall) -> tuple[dict[int, torch.Tensor], str]:
    """The arguments that need a gradient, beside what they were, and why nothing can be tried
    there, or ""."""
    values = {i: a for i, (a, needs) in enumerate(zip(call.args, call.needs, strict=True)) if needs}
    if sum(x.numel() for x in values.values()) > LARGEST_CALL:
        return values, "its arguments are too large to be tried"
    beside = {i: x + BESIDE * way_from(x) for i, x in values.items()}
    nearer = {i: x + BESIDE * way_from(x, relative=True) for i, x in values.items()}
    for at in (beside, nearer, values):
        again = [vector(called_with(call, at)) for _ in range(2)]
        if not torch.equal(*again) and bool(again[0].isfinite().all()):
            return at, "it gives other numbers each time, with the same random seed"
        if bool(again[0].isfinite().all()):
            return at, ""
    return values, "it gives NaN or infinity"


def live_of(call: FunctionCall, values: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """A gradient for each result that the backward passes one back from: some results are there to
    be saved, and theirs is dropped."""
    live = {}
    for j, y in enumerate(called_with(call, needing(values))):
        if isinstance(y, torch.Tensor) and y.requires_grad and y.numel():
            sent = drawn(y)
            if any(nonzero(t) for t in backward_of(call, values, {j: sent})):
                live[j] = sent
    return live


def of_argument(
    call: FunctionCall,
    values: Mapping[int, torch.Tensor],
    live: Mapping[int, torch.Tensor],
    i: int,
) -> Derivative:
    """A few directions, and many fresh ones where these are not as they should be."""
    place = call.name, call.module, call.argument(i)

    def said(slopes: Sequence[Slope], why: str = "", share: float = SHARE) -> Derivative:
        worst = max(slopes, key=lambda s: abs(s.backward - s.slope) / (s.size or 1.0))
        allowed = max(ERRORS * worst.error, SHARE * worst.size)
        numbers = worst.slope, worst.error, worst.backward, allowed
        return Derivative(*place, why, *numbers, share_off(slopes), share, len(slopes))

    slopes = [slope_along(call, values, live, i) for _ in range(FEW)]
    clear = all(s.error <= CLEAR * s.size for s in slopes)
    if clear and all(abs(s.backward - s.slope) <= SHARE * s.size for s in slopes):
        return said(slopes)
    slopes = [slope_along(call, values, live, i) for _ in range(MANY)]
    if why := meant(call, values, live, i, slopes):
        return said(slopes, why)
    wrong = [abs(s.backward - s.slope) > ERRORS * s.error for s in slopes]
    if not all(wrong):
        why = f"finite differences are too rough to tell on {wrong.count(False)} of {MANY} tries"
        return said(slopes, why)
    rough = roughness(call, values, live, i)
    if share_off(slopes) <= rough:
        return said(slopes, f"it is off by {share_off(slopes):.2g} of the slope, which may round")
    return said(slopes, share=rough)


def share_off(slopes: Sequence[Slope]) -> float:
    """Root mean square of what the backward is off by, a share of that of the slopes."""
    off = math.hypot(*(s.backward - s.slope for s in slopes))
    return off / (math.hypot(*(s.size for s in slopes)) or 1.0)


def roughness(
    call: FunctionCall,
    values: Mapping[int, torch.Tensor],
    live: Mapping[int, torch.Tensor],
    i: int,
) -> float:
    """What share of the slope a backward may be off by: it may round, and is then not additive in
    the gradients that it gets; nor is one that clips them, or adds a gradient of its own. An object
    among the arguments may hold what is rounded in forward alone, out of sight."""
    known = (torch.Tensor, bool, int, float, str, list, tuple, torch.dtype, torch.device)
    hidden = any(not (a is None or isinstance(a, known)) for a in call.args)
    sent = [{j: drawn(g) for j, g in live.items()} for _ in range(2)]
    sent.append({j: sent[0][j] + sent[1][j] for j in live})
    grads = [backward_of(call, values, one)[list(values).index(i)] for one in sent]
    first, second, both = (vector([g]) for g in grads)
    if not (first.numel() == second.numel() == both.numel()):
        return math.inf
    apart = (both - first - second).norm().item() / (both.norm().item() or 1.0)
    return max(SHARE, HIDDEN * hidden, 8.0 * apart)


def meant(
    call: FunctionCall,
    values: Mapping[int, torch.Tensor],
    live: Mapping[int, torch.Tensor],
    i: int,
    slopes: Sequence[Slope],
) -> str:
    """Why a backward that is not the derivative may well be meant so, or why there is none; ""."""
    sent = {j: drawn(g) for j, g in live.items()}
    gradients = backward_of(call, values, sent)
    gradient = gradients[list(values).index(i)]
    if gradient is None or not nonzero(gradient):
        return "its backward leaves this gradient out"
    if multiple_of(called_with(call, needing(values)), live, values):
        return "its forward returns what it is given, so its gradient is changed on purpose"
    if any(s.constant for s in slopes):
        return "its result does not move with it, and a gradient passes: straight through"
    if max(s.leap for s in slopes) > STEEP:
        return "its result moves in leaps: it rounds, or it is steep"
    for j in others_of(call, i):
        # a backward may be that of the same without rounding, for every argument
        for _ in range(FEW):
            # from a little beside it: what was rounded before stands on a grid
            way, start = way_from(call.args[j]), BESIDE * way_from(call.args[j])
            there = call if j in values else with_argument(call, j, call.args[j] + start)
            if differences(there, values, sent, j, way).leap > STEEP:
                return f"its result moves in leaps with {call.argument(j)}: it rounds there"
    if passes_through(call, values, live, i, gradient):
        return "its result does not move with some elements whose gradient passes: straight through"
    return ""


def others_of(call: FunctionCall, i: int) -> list[int]:
    """The other arguments that hold floats, whether they need a gradient or not."""
    return [
        j
        for j, a in enumerate(call.args)
        if j != i
        and isinstance(a, torch.Tensor)
        and a.numel()
        and (a.is_floating_point() or a.is_complex())
        and bool(a.isfinite().all())
    ]


def multiple_of(
    results: Sequence[Any], live: Mapping[int, Any], values: Mapping[int, torch.Tensor]
) -> bool:
    """True where a result is an argument, or a constant times it, in whatever shape."""
    for y in (vector([results[j]]) for j in live):
        for x in (vector([x]) for x in values.values()):
            if y.numel() == x.numel() and nonzero(x):
                # a single number is a multiple of any other
                factor = y.dot(x) / x.dot(x) if x.numel() > 1 else 1.0
                if (y - factor * x).norm() <= 1e-6 * y.norm():
                    return True
    return False


def passes_through(
    call: FunctionCall,
    values: Mapping[int, torch.Tensor],
    live: Mapping[int, torch.Tensor],
    i: int,
    gradient: torch.Tensor,
) -> bool:
    """True where an element has a gradient that the results do not move with at all near where it
    is, but do farther off: one that is clamped, or rounded to a grid."""
    x, here = values[i], moved(call, values, live, i, torch.zeros_like(values[i]))
    sizes = gradient.detach().abs().reshape(-1)
    some = torch.randperm(sizes.numel())[: ELEMENTS // 2].to(sizes.device)
    chosen = torch.cat([sizes.topk(min(ELEMENTS // 2, sizes.numel())).indices, some])

    def moves(element: int, step: float) -> bool:
        by = torch.zeros(x.numel(), dtype=x.dtype, device=x.device)
        by[element] = step * size_of(x)
        return not torch.equal(moved(call, values, live, i, by.reshape(x.shape)), here)

    for element in chosen[sizes[chosen] > 1e-6 * sizes.max()].tolist():
        still = not moves(element, LEAST) and not moves(element, -LEAST)
        if still and any(moves(element, step) for step in FAR):
            return True
    return False


def wrong_backward(
    found: Sequence[Derivative], function: str, argument: str
) -> tuple[str, bool | None]:
    """Of this argument of this Function, in words, whether its backward is wrong; None: cannot
    tell."""
    for one in found:
        if (one.function, one.argument) == (function, argument) and not one.why:
            wrong = abs(one.backward - one.slope) > one.allowed
            return (
                f"{function}({argument}): directional derivative {one.slope:.9g} "
                f"+- {one.error:.1g} by finite differences, backward gives {one.backward:.9g}; "
                f"off by {one.off:.2%} over {one.directions} directions, allowed {one.share:.2%}"
            ), wrong
    return f"{function}({argument}): cannot tell here", None
