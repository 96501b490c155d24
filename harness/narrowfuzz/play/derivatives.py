"""The backward of a user's own ``torch.autograd.Function`` is the derivative of its forward: in
float64, against finite differences that bring their own error.

For a gradient g sent into the results, a direction d of one argument x and a step h,

    s(h) = <g, F(x + h d) - F(x - h d)> / 2h  ->  <backward(g), d>   as h -> 0.

Two neighbouring steps give a slope (Richardson's) and how much it moved; the two one-sided slopes
part by another amount where F has a kink. Both are its error. A backward is called wrong only where
it leaves that error many times over on every one of many fresh g and d, and where nothing says that
it is meant so: see ``meant``.

A stand-alone script is written from this source.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from narrowfuzz.play.functions import (
    FunctionCall,
    backward_of,
    called_with,
    function_calls,
    in_float64,
    needing,
)

#: Of one argument of one Function: the module that called it, the slope by finite differences and
#: its error, what the backward gives along the same direction, by how much these may differ, and
#: their root mean square difference as a share of the slopes. ``why`` nothing can be said, or "".
Derivative = namedtuple(
    "Derivative", "function module argument why slope error backward allowed off"
)
#: One direction: ``size`` is what a sum of so many products comes to, ``leap`` how many times as
#: steep a finite step was as the smallest one, at the steepest.
Slope = namedtuple("Slope", "slope error backward size leap constant")

#: Steps as shares of an argument's root mean square: from what crosses the grid of an 8-bit number
#: to where fp32 inside of a Function still tells two points apart.
STEPS = tuple(2.0**-k for k in range(2, 21, 2))
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
#: More numbers in the arguments than these take too long.
LARGEST_CALL = 2**23


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
    return found


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
    return Derivative(call.name, call.module, call.argument(i), why, nan, nan, nan, nan, nan)


def follows(call: FunctionCall, other: FunctionCall | None) -> bool:
    """True where floats that need no gradient differ from forward to forward: they may hang on what
    does, and the backward may be that of both. Without the other call nobody knows."""
    if other is None or other.function is not call.function:
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
    """The arguments that need a gradient, a little beside what they were: a kink or a tie is where
    a model's numbers often are, zero. And why nothing can be tried there, or ""."""
    values = {i: a for i, (a, needs) in enumerate(zip(call.args, call.needs, strict=True)) if needs}
    if sum(x.numel() for x in values.values()) > LARGEST_CALL:
        return values, "its arguments are too large to be tried"
    beside = {i: x + 2.0**-6 * size_of(x) * drawn(x) for i, x in values.items()}
    for at in (beside, values):
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


def nonzero(t: torch.Tensor | None) -> bool:
    return t is not None and bool(t.count_nonzero())


def drawn(like: torch.Tensor) -> torch.Tensor:
    """Normal numbers in the shape and type of a tensor, drawn on the CPU."""
    wide = torch.complex128 if like.is_complex() else torch.float64
    return torch.randn(like.shape, dtype=wide).to(like.device, like.dtype)


def size_of(x: torch.Tensor) -> float:
    """The root mean square, 1 where that is nothing."""
    size = x.detach().abs().square().mean().sqrt().item() if x.numel() else 0.0
    return size if size and math.isfinite(size) else 1.0


def vector(tensors: Sequence[Any]) -> torch.Tensor:
    """All numbers of the tensors of floats, one after the other."""
    real = [
        (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).detach().double()
        for t in tensors
        if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())
    ]
    return torch.cat([t.reshape(-1) for t in real]) if real else torch.zeros(0)


def of_argument(
    call: FunctionCall,
    values: Mapping[int, torch.Tensor],
    live: Mapping[int, torch.Tensor],
    i: int,
) -> Derivative:
    """A few directions, and many fresh ones where these are not as they should be."""
    place = call.name, call.module, call.argument(i)

    def said(slopes: Sequence[Slope], why: str = "") -> Derivative:
        worst = max(slopes, key=lambda s: abs(s.backward - s.slope) / (s.size or 1.0))
        allowed = max(ERRORS * worst.error, SHARE * worst.size)
        numbers = worst.slope, worst.error, worst.backward, allowed
        return Derivative(*place, why, *numbers, share_off(slopes))

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
    if share_off(slopes) <= SHARE:
        return said(slopes, f"it is off by {share_off(slopes):.2g} of the slope, which may round")
    return said(slopes)


def share_off(slopes: Sequence[Slope]) -> float:
    """Root mean square of what the backward is off by, a share of that of the slopes."""
    off = math.hypot(*(s.backward - s.slope for s in slopes))
    return off / (math.hypot(*(s.size for s in slopes)) or 1.0)


def slope_along(
    call: FunctionCall,
    values: Mapping[int, torch.Tensor],
    live: Mapping[int, torch.Tensor],
    i: int,
) -> Slope:
    """Along a fresh direction of argument i, for a fresh gradient of the results."""
    sent = {j: drawn(g) for j, g in live.items()}
    direction = size_of(values[i]) * drawn(values[i])
    gradient = backward_of(call, values, sent)[list(values).index(i)]
    along = 0.0 if gradient is None else vector([gradient]).dot(vector([direction])).item()
    slope = differences(call, values, sent, i, direction)
    return slope._replace(backward=along, size=max(slope.size, abs(along)))


def differences(
    call: FunctionCall,
    values: Mapping[int, torch.Tensor],
    sent: Mapping[int, torch.Tensor],
    i: int,
    direction: torch.Tensor,
) -> Slope:
    """What finite differences say, step by step."""
    g, parts = vector([*sent.values()]), [vector([t]).numel() for t in sent.values()]
    here = moved(call, values, sent, i, 0.0 * direction)
    slopes, gaps, sizes, steeps = [], [], [], []
    for h in STEPS:
        up, down = (moved(call, values, sent, i, step * direction) for step in (h, -h))
        central = (up - down) / (2 * h)
        slopes.append(g.dot(central).item())
        gaps.append(g.dot(up - 2 * here + down).item() / h)
        sizes.append((g * central).norm().item())
        far = torch.maximum((up - here).abs(), (here - down).abs()) / h
        steeps.append([part.max().item() for part in far.split(parts)])
    errors = [
        abs(slopes[k + 1] - slopes[k]) + abs(4 * gaps[k + 1] - gaps[k]) / 3
        for k in range(len(STEPS) - 1)
    ]
    k = min(range(len(errors)), key=errors.__getitem__)
    slope = slopes[k + 1] + (slopes[k + 1] - slopes[k]) / 15
    leap = max(leap_of([step[j] for step in steeps]) for j in range(len(parts)))
    size = max(abs(slope), sizes[k + 1])
    return Slope(slope, errors[k], math.nan, size, leap, not any(steeps[-1]))


def leap_of(steeps: Sequence[float]) -> float:
    """How many times as steep as over the last step it was over one that was steeper than the four
    times longer step before: a leap of the same height is. What bends is less so, step by step."""
    most = max((s for before, s in pairwise(steeps) if s > 1.5 * before), default=0.0)
    return most / steeps[-1] if steeps[-1] else math.inf if most else 1.0


def moved(
    call: FunctionCall,
    values: Mapping[int, torch.Tensor],
    live: Mapping[int, torch.Tensor],
    i: int,
    by: torch.Tensor,
) -> torch.Tensor:
    """The numbers of the live results where argument i is moved."""
    if i in values:
        values = {**values, i: values[i] + by}
    else:  # it needs no gradient
        args = (*call.args[:i], call.args[i] + by, *call.args[i + 1 :])
        call = FunctionCall(call.function, call.module, args, call.kwargs, call.needs)
    y = called_with(call, needing(values))
    return vector([y[j] for j in live])


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
        along = [size_of(call.args[j]) * drawn(call.args[j]) for _ in range(FEW)]
        if max(differences(call, values, sent, j, d).leap for d in along) > STEEP:
            return f"its result moves in leaps with {call.argument(j)}: it rounds, or it is steep"
    if passes_through(call, values, live, i, gradient):
        return "its result does not move with some elements whose gradient passes: straight through"
    less = backward_of(call, values, {j: 0.7 * g for j, g in sent.items()})
    full, part = vector([gradient]), vector([less[list(values).index(i)]])
    if part.numel() != full.numel() or (part - 0.7 * full).norm() > CLEAR * full.norm():
        return "its backward is not linear in the gradient that it gets: it clips, rounds or adds"
    return ""


def others_of(call: FunctionCall, i: int) -> list[int]:
    """The other arguments that hold floats, whether they need a gradient or not."""
    return [
        j for j, a in enumerate(call.args)
        if j != i and isinstance(a, torch.Tensor) and a.numel()
        and (a.is_floating_point() or a.is_complex()) and bool(a.isfinite().all())
    ]  # fmt: skip


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
                f"+- {one.error:.1g} by finite differences, backward gives {one.backward:.9g}"
            ), wrong
    return f"{function}({argument}): cannot tell here", None
