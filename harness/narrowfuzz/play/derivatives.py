"""Checks that the backward of a user's ``torch.autograd.Function`` is the derivative of its
forward: in float64, against finite differences with an error estimate (``differences.py``).

A backward is called wrong only if it is off by many times that error for every one of many fresh
gradients and directions, and if nothing suggests that this is intended: see ``meant``.

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

#: For one argument of one Function: the module that called it; the slope by finite differences, its
#: error, what the backward gives along the same direction and the allowed difference, all in the
#: worst direction; ``off``, their root mean square difference as a share of the slopes, the allowed
#: ``share``, and the number of directions. ``why`` there is no verdict, or "".
Derivative = namedtuple(
    "Derivative", "function module argument why slope error backward allowed off share directions"
)
#: Before they are tried, arguments are moved by this share of their root mean square: away from
#: kinks, from a grid that they were rounded to, and from values that a backward may have saved.
BESIDE = 2.0**-4
#: The number of directions tried first, and of fresh ones if the first do not agree.
FEW, MANY = 2, 20
#: A slope may be off by this many errors: an estimate that moved by e from one step to the next, a
#: quarter as long, is a sixteenth of e off; in noise a few times e.
ERRORS = 64.0
#: The least that a backward may be off by, a share of the slope: it may round to bf16.
SHARE = 2.0**-7
#: A slope whose error is a larger share of it than this decides nothing.
CLEAR = 2.0**-10
#: A smooth function is at most this much steeper over a finite step than over the smallest.
STEEP = 8.0
#: A single element is moved by LEAST and then by FAR, as shares of the root mean square.
LEAST, FAR = 2.0**-12, (0.25, -0.25, 1.0, -1.0, 4.0, -4.0, 16.0, -16.0)
#: The number of elements that are moved one at a time, and of those that are found by halving.
ELEMENTS, FOUND = 48, 4
#: The share that a backward may be off by if an object is among the arguments.
HIDDEN = 0.25
#: A call with more numbers in its arguments takes too long to be tried.
LARGEST_CALL = 2**22


def derivatives(own: Any, ids: int) -> list[Derivative]:
    """Results for every user-defined Function that a forward of this ``OwnModel`` calls and every
    argument that needs a gradient, once for each kind of call. ``ids``: see ``function_calls``.

    Parameters are moved a little first: one that is zero hides what it is multiplied by.
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
    with_gradient = {kind[0] for kind in kinds}
    idle = {c.name: c for c in calls if c.args and c.name not in with_gradient}
    why = (
        "in a forward it is asked for no gradient, as inside of another autograd.Function or of "
        "no_grad"
    )
    return found + [unsaid(c, 0, why) for c in idle.values()]


def of_call(call: FunctionCall, other: FunctionCall | None) -> Iterator[Derivative]:
    """Results for each argument that needs a gradient; ``other``: this call in another forward."""
    indices = [i for i, needs in enumerate(call.needs) if needs]
    try:
        wide = in_float64(call)
        values, why = point_of(wide)
        sent = {} if why else live_of(wide, values)
        if not (sent or why):
            why = "its backward gives no gradient of anything"
        why = why or follows(call, other)
        for i in indices:
            yield (unsaid(call, i, why) if why else of_argument(wide, values, sent, i))
    except Exception as error:  # noqa: BLE001 - it is a user's code, and what it raised is reported
        lines = str(error).strip().splitlines() or [""]
        why = f"it does not run in float64: {type(error).__name__}: {lines[0][:200]}"
        yield from (unsaid(call, i, why) for i in indices)


def unsaid(call: FunctionCall, i: int, why: str) -> Derivative:
    """A result without a verdict on this argument."""
    nan = math.nan
    return Derivative(
        call.name, call.module, call.argument(i), why, nan, nan, nan, nan, nan, nan, 0
    )


def follows(call: FunctionCall, other: FunctionCall | None) -> str:
    """Why the backward may be more than the derivative of this forward, or "": floats that need no
    gradient differ between two forwards of the model, so they may be computed from arguments that
    need one, and the backward may include that."""
    if other is None or other.name != call.name:
        return (
            "two forwards of the model do not call the same Functions, so it is unknown which of "
            "its inputs depend on each other"
        )
    for i, needs in enumerate(call.needs[: len(other.args)]):
        mine, theirs = call.args[i], other.args[i]
        if isinstance(mine, torch.Tensor):
            floats = mine.is_floating_point() or mine.is_complex()
            same = isinstance(theirs, torch.Tensor) and torch.equal(mine, theirs)
            changes = not needs and floats and not same
        else:
            changes = isinstance(mine, float) and mine != theirs
        if changes:
            return (
                f"its input {call.argument(i)} has no gradient, but is another one with other "
                "data: it may depend on the inputs that have one, and the backward may include that"
            )
    return ""


def point_of(call: FunctionCall) -> tuple[dict[int, torch.Tensor], str]:
    """Finite values, if possible slightly moved, for the arguments that need a gradient; and why
    nothing can be tried there, or ""."""
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
    """A random gradient for each result whose gradient the backward uses: some results are returned
    only to be saved, and their gradients are dropped."""
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
    """Try a few directions, and many fresh ones if those do not agree."""
    place = call.name, call.module, call.argument(i)

    def answer(slopes: Sequence[Slope], why: str = "", share: float = SHARE) -> Derivative:
        worst = max(slopes, key=lambda s: abs(s.backward - s.slope) / (s.size or 1.0))
        allowed = max(ERRORS * worst.error, SHARE * worst.size)
        numbers = worst.slope, worst.error, worst.backward, allowed
        return Derivative(*place, why, *numbers, share_off(slopes), share, len(slopes))

    slopes = [slope_along(call, values, live, i) for _ in range(FEW)]
    clear = all(s.error <= CLEAR * s.size for s in slopes)
    if clear and all(abs(s.backward - s.slope) <= SHARE * s.size for s in slopes):
        return answer(slopes)
    moving = moved_by(call, values, live, i)
    if 0 < len(moving) < len(live):  # those that stay, as spikes, get a gradient on purpose
        return of_argument(call, values, moving, i)
    slopes = [slope_along(call, values, live, i) for _ in range(MANY)]
    if why := meant(call, values, live, i, slopes):
        return answer(slopes, why)
    wrong = [abs(s.backward - s.slope) > ERRORS * s.error for s in slopes]
    if not all(wrong):
        why = f"finite differences are too rough to tell on {wrong.count(False)} of {MANY} tries"
        return answer(slopes, why)
    rough = roughness(call, values, live, i)
    if share_off(slopes) <= rough:
        return answer(slopes, f"it is off by {share_off(slopes):.2g} of the slope, which may round")
    return answer(slopes, share=rough)


def moved_by(
    call: FunctionCall,
    values: Mapping[int, torch.Tensor],
    live: Mapping[int, torch.Tensor],
    i: int,
) -> dict[int, torch.Tensor]:
    """The results that move with the argument."""
    alone = {j: {j: g} for j, g in live.items()}
    return {j: live[j] for j in live if not slope_along(call, values, alone[j], i).constant}


def share_off(slopes: Sequence[Slope]) -> float:
    """The root mean square error of the backward, as a share of that of the slopes."""
    off = math.hypot(*(s.backward - s.slope for s in slopes))
    return off / (math.hypot(*(s.size for s in slopes)) or 1.0)


def roughness(
    call: FunctionCall,
    values: Mapping[int, torch.Tensor],
    live: Mapping[int, torch.Tensor],
    i: int,
) -> float:
    """The share of the slope that a backward may be off by. One that rounds or clips the gradients
    that it gets, or adds a gradient of its own, is not additive in them, by which it is recognised.
    An object among the arguments may hold values that only the forward rounds, out of sight."""
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
    """Why a backward that is not the derivative may well be intended, or "" for no reason."""
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
        # a backward may be that of the unrounded function, for every argument
        for _ in range(FEW):
            # start slightly beside the value: one that was rounded before lies on a grid
            way, start = way_from(call.args[j]), BESIDE * way_from(call.args[j])
            there = call if j in values else with_argument(call, j, call.args[j] + start)
            if differences(there, values, sent, j, way).leap > STEEP:
                return f"its result moves in leaps with {call.argument(j)}: it rounds there"
    if passes_through(call, values, live, i, gradient):
        return "its result does not move with some elements whose gradient passes: straight through"
    return ""


def others_of(call: FunctionCall, i: int) -> list[int]:
    """Indices of the other arguments that hold finite floats, needing a gradient or not."""
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
    """True if a result is an argument times a constant (which may be 1, and is not 0), in any
    shape."""
    for y in (vector([results[j]]) for j in live):
        for x in (vector([x]) for x in values.values()):
            if y.numel() == x.numel() and nonzero(x) and nonzero(y):
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
    """True if an element has a gradient although the results do not change at all close to its
    value, but do farther away: it is clamped, or rounded to a grid. Few of many elements may be:
    those where the backward is off are tried first."""
    x, here = values[i], moved(call, values, live, i, torch.zeros_like(values[i]))
    sizes = gradient.detach().abs().reshape(-1)
    off = torch.tensor([off_at(call, values, live, i) for _ in range(FOUND)]).to(sizes.device)
    some = torch.randperm(sizes.numel())[: ELEMENTS // 2].to(sizes.device)
    chosen = torch.cat([off, sizes.topk(min(ELEMENTS // 2, sizes.numel())).indices, some])

    def moves(element: int, step: float) -> bool:
        by = torch.zeros(x.numel(), dtype=x.dtype, device=x.device)
        by[element] = step * size_of(x)
        return not torch.equal(moved(call, values, live, i, by.reshape(x.shape)), here)

    for element in chosen[sizes[chosen] > 1e-6 * sizes.max()].tolist():
        still = not moves(element, LEAST) and not moves(element, -LEAST)
        if still and any(moves(element, step) for step in FAR):
            return True
    return False


def off_at(
    call: FunctionCall,
    values: Mapping[int, torch.Tensor],
    live: Mapping[int, torch.Tensor],
    i: int,
) -> int:
    """The index of an element where the backward is not the slope: of a random direction's elements
    the half is kept along which the two differ more, until one element is left."""
    x, sent = values[i], {j: drawn(g) for j, g in live.items()}
    g, way = vector([*sent.values()]), way_from(x).reshape(-1)
    gradient = backward_of(call, values, sent)[list(values).index(i)]

    def off(elements: torch.Tensor) -> float:
        part = torch.zeros_like(way)
        part[elements] = way[elements]
        part = part.reshape(x.shape)
        up, down = (moved(call, values, sent, i, step * part) for step in (LEAST, -LEAST))
        along = 0.0 if gradient is None else vector([gradient]).dot(vector([part])).item()
        return abs(along - g.dot(up - down).item() / (2 * LEAST))

    left = torch.randperm(way.numel()).to(way.device)
    while left.numel() > 1:
        left = max(left.tensor_split(2), key=off)
    return int(left.item())


def wrong_backward(
    found: Sequence[Derivative], function: str, argument: str
) -> tuple[str, bool | None]:
    """A sentence on this argument of this Function, and whether its backward is wrong; None: cannot
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
