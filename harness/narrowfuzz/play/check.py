"""Checks that a script makes of whole runs, where no single element is wrong by itself.

Each function returns a sentence that describes the result, and whether the divergence shows.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import torch

from narrowfuzz.play.attention_scores import scores, sums_to_one
from narrowfuzz.play.watches import Attended, Product

Results = Mapping[str, torch.Tensor]
Sentence = tuple[str, bool]


def plain(t: torch.Tensor) -> torch.Tensor:
    """The tensor in float64, changed so that NaN equals NaN and -0 equals 0."""
    return t.double().nan_to_num(nan=0.5) + 0.0


def rows(t: torch.Tensor) -> torch.Tensor:
    """In fp32, all but the last dimension flattened; a library's own tensor is unwrapped first."""
    t = getattr(t, "_data", t)
    return (t.flatten(0, -2) if t.dim() > 1 else t).float()


def of_weight(products: Sequence[Product], weight: torch.Tensor) -> Product:
    """The forward product whose second operand is nearest to the weight. Raises ValueError if none
    has its shape."""

    def far(p: Product) -> float:
        scale = 1.0 if p.scale_b is None else p.scale_b.double()
        return float(((p.b.double() * scale).cpu() - weight.double()).abs().sum())

    fitting = [p for p in products if p.phase == "forward" and p.b.shape == weight.shape]
    return min(fitting, key=far)


def equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """The same shape and the same values."""
    return x.shape == y.shape and torch.equal(plain(x), plain(y))


def crc(t: torch.Tensor) -> int:
    """Checksum of a tensor's fp32 values."""
    return zlib.crc32(bytes(t.float().flatten().view(torch.uint8).tolist()))


def different(first: Results, *others: Results) -> Sentence:
    """Names of results that differ between the first run and any of the others."""
    names = {}
    for other in others:
        for name in {**first, **other}:
            if not (name in first and name in other and equal(first[name], other[name])):
                names[name] = True
    return f"different: {', '.join(names) or 'nothing'}", bool(names)


def missing(results: Results, names: Sequence[str]) -> Sentence:
    """Which of the gradients with these names are missing."""
    lacking = [name for name in names if name not in results]
    return f"no gradient of: {', '.join(lacking) or 'nothing'}", bool(lacking)


def not_the_sum(whole: Results, *parts: Results) -> Sentence:
    """Gradients that are not the sum of the parts' gradients, added one by one in their dtype."""
    total = {name: grad for name, grad in parts[0].items() if name.endswith(".grad")}
    for part in parts[1:]:
        total = {name: grad + part[name] for name, grad in total.items()}
    wrong = [n for n, grad in total.items() if n not in whole or not equal(grad, whole[n])]
    return f"not the sum of the parts' gradients: {', '.join(wrong) or 'nothing'}", bool(wrong)


def beyond(
    exact: torch.Tensor,
    eager: torch.Tensor,
    got: torch.Tensor,
    *,
    usual: float,
    ratio: float,
    floor: float,
) -> Sentence:
    """The root mean square error of ``got`` must be at most ``floor`` plus ``ratio`` times eager's
    error or the ``usual`` one, whichever is larger; and ``got`` must be finite."""

    def rms(t: torch.Tensor) -> float:
        return t.double().square().mean().sqrt().item()

    far, limit = rms(got - exact), ratio * max(rms(eager - exact), usual) + floor
    finite = bool(got.isfinite().all())
    sentence = f"error {far:.4g}, tolerance {limit:.4g}, {'finite' if finite else 'not finite'}"
    return sentence, not finite or far > limit


def own_backward(
    results: Results, tensors: Results, last: str, allowed: float, largest: float, tiny: float
) -> Sentence:
    """For each output of the last linear, sum(output * its gradient) must equal sum(weight * its
    gradient), plus the bias's. Below ``tiny`` a result is allowed the error of ``tiny``."""
    grad, weight = results[f"{last}.weight.grad"].double(), tensors[f"{last}.weight"].double()
    y = results["output"].double()
    g = tensors["grad_output"].double().reshape(y.shape)
    left, right = (g * y).sum(0), (grad * weight).sum(1)
    size = (g.abs() * y.abs().clamp(min=tiny)).sum(0)
    size = size + (grad.abs().clamp(min=tiny) * weight.abs()).sum(1)
    if f"{last}.bias.grad" in results:
        grad, bias = results[f"{last}.bias.grad"].double(), tensors[f"{last}.bias"].double()
        right, size = right + grad * bias, size + grad.abs().clamp(min=tiny) * bias.abs()
    far = (left - right).abs() / (allowed * size)
    far = far[size.isfinite() & (size < largest) & (size > 2.0**-60)]
    worst = far.nan_to_num(nan=math.inf).max().item() if far.numel() else 0.0
    return f"the sums differ by {worst:.3g} times what rounding explains", worst > 1.0


def statistics(attention: Sequence[Attended], allowed: float) -> Sentence:
    """Attention backwards must get their forward's tensors, and probabilities must sum to 1."""
    forwards = [a for a in attention if a.phase == "forward"]
    backwards = [a for a in attention if a.phase == "backward"]
    lost, moved, worst = 0, 0, 0.0
    for a in backwards:
        matching = [f for f in forwards if equal(f.lse, a.lse) and equal(f.out, a.out)]
        lost += not matching
        for name in "qkv":
            changed = [(plain(getattr(f, name)) != plain(getattr(a, name))).sum() for f in matching]
            moved += int(min(changed, default=0))
        if a.unknown:
            continue
        summed = scores(a.q.double(), a.k.double(), a.scale, a.added)
        lse = a.lse.double().reshape(summed.shape[:-1])
        total = (summed - lse.unsqueeze(-1)).exp().sum(-1)
        off = (total - 1).abs()[sums_to_one(summed, lse, a.added)]
        worst = max([worst, *off.nan_to_num(nan=math.inf).flatten().tolist()])
    sentence = (
        f"{len(backwards)} attention backwards, {lost} with statistics of no forward; elements of "
        f"q, k, v that moved since: {moved}; rows of probabilities sum to 1 within {worst:.2g}"
    )
    return sentence, bool(lost or moved or worst > allowed)


def recomputed_otherwise(products: Sequence[Product]) -> Sentence:
    """Products of backward that use a forward product's weight must repeat that product."""
    forwards = [p for p in products if p.phase == "forward"]
    moved = repeated = 0

    def same(x: Product, y: Product, side: str) -> bool:
        pairs = [(getattr(p, side), getattr(p, f"scale_{side}")) for p in (x, y)]
        (values, scale), (others, its) = pairs
        if (scale is None) != (its is None) or not equal(values, others):
            return False
        return scale is None or equal(scale, its)

    for p in (p for p in products if p.phase == "backward"):
        first = [f for f in forwards if same(f, p, "b")]
        # a product with a symmetric weight may compute the input gradient as well
        if first and not (p.b.shape[0] == p.b.shape[1] and equal(p.b, p.b.t())):
            repeated += 1
            moved += not any(same(f, p, "a") for f in first)
    sentence = (
        f"{repeated} products computed again in backward, {moved} of them from other operands"
    )
    return sentence, bool(moved)


def wrong_products(products: Sequence[Product]) -> Sentence:
    """Each product may differ from float64 by at most K + 3 roundings of fp32, in any order of
    summation, plus the rounding of the result to its dtype."""
    worst = 0.0
    for p in products:
        scales = [1.0 if s is None else s.double() for s in (p.scale_a, p.scale_b)]
        a, b = p.a.double() * scales[0], p.b.double() * scales[1]
        added = torch.zeros(()) if p.bias is None else p.bias.double()
        size, n = a.abs() @ b.abs().t(), (a.shape[1] + 3) * 2.0**-24
        exact, radius = a @ b.t() + added, n / (1 - n) * size + (a.shape[1] + 1) * 2.0**-126
        kind = torch.finfo(p.result.dtype)
        allowed = radius + kind.eps * (exact.abs() + added.abs() + radius)
        far = ((p.result.double() - exact).abs() / allowed)[size + added.abs() < kind.max]
        worst = max([worst, *far.nan_to_num(nan=math.inf).flatten().tolist()])
    sentence = f"the worst of {len(products)} products is off by {worst:.3g} times its tolerance"
    return sentence, worst > 1.0
