"""The last lines of a model's repro.py: what is looked at, and what it must be."""

from __future__ import annotations

from narrowfuzz.case import Spec
from narrowfuzz.expect import Near, Present, Refuses
from narrowfuzz.models.zoo import MODELS
from narrowfuzz.numerics.formats import FORMATS
from narrowfuzz.oracles.own_backward import allowed, largest
from narrowfuzz.oracles.whole import SMALL, SMALL_RATIO, ratio_limit
from narrowfuzz.triage.script_checks import (
    ACCEPTED,
    ELEMENT_RULES,
    check_element,
    check_raises,
)
from narrowfuzz.triage.script_parts import POISON
from narrowfuzz.verdict import Verdict

#: How a Trace calls a single linear's results, and how its parameters are called.
_OF_LINEAR = {"grad_weight": "proj.weight.grad", "grad_bias": "proj.bias.grad"}

_RATIO = """
def rms(t):
    return t.double().square().mean().sqrt().item()
name, part = {name!r}, {part}
exact, eager, guilty = (run(which)[name][part] for which in ("exact", "eager", "guilty"))
base, far, finite = rms(eager - exact), rms(guilty - exact), bool(guilty.isfinite().all())
ratio = {ratio}
limit = ratio * base + {floor!r} * rms(run("exact")[name])
print(f"{{name}}: error {{far:.4g}}, allowed {{limit:.4g}}, finite: {{finite}}")
sys.exit(1 if not finite or far > limit else 0)
"""

_EQUAL = """
def plain(t):
    return t.double().nan_to_num(nan=0.5) + 0.0
first = run({first!r})
{between}
second = run({second!r})
def same(name):
    both = name in first and name in second
    return both and torch.equal(plain(first[name]), plain(second[name]))
different = [name for name in {{**first, **second}} if not same(name)]
print("different:", ", ".join(different) or "nothing")
sys.exit(1 if different else 0)
"""

_ADDED = """
whole, total = run("eager"), {{}}
for turn in range({microbatches}):
    for name, grad in run("eager", [turn]).items():
        if name.endswith(".grad"):
            total[name] = total[name] + grad if turn else grad
def plain(t):
    return t.double().nan_to_num(nan=0.5) + 0.0
different = [name for name, grad in total.items()
             if name not in whole or not torch.equal(plain(grad), plain(whole[name]))]
print("not the sum of the microbatches' gradients:", ", ".join(different) or "nothing")
sys.exit(1 if different else 0)
"""

_OWN = """
found, last = run("guilty"), {last!r}
g, y = (t.double().reshape(-1, t.shape[-1]) for t in (tensors["grad_output"], found["output"]))
w, grad = tensors[last + ".weight"].double(), found[last + ".weight.grad"].double()
left, right = (g * y).sum(0), (grad * w).sum(1)
size = (g.abs() * y.abs().clamp(min={tiny!r})).sum(0)
size = size + (grad.abs().clamp(min={tiny!r}) * w.abs()).sum(1)
if last + ".bias.grad" in found:
    grad, b = found[last + ".bias.grad"].double(), tensors[last + ".bias"].double()
    right, size = right + grad * b, size + grad.abs().clamp(min={tiny!r}) * b.abs()
far = (left - right).abs() / ({allowed!r} * size)
far = far[size.isfinite() & (size < {largest!r}) & (size > 2.0**-60)]
worst = far.nan_to_num(nan=math.inf).max().item() if far.numel() else 0.0
print(f"the output times its gradient, and the last weight times its: sums differ by {{worst:.3g}}"
      " of what rounding allows")
sys.exit(1 if worst > 1.0 else 0)
"""

_MISSING = """
found = run("guilty")
missing = [name for name in {names!r} if name not in found]
print("no gradient of:", ", ".join(missing) or "nothing")
sys.exit(1 if missing else 0)
"""


def check_whole(spec: Spec, verdict: Verdict) -> str:
    """The lines that look at ``run``'s results. Raises ValueError for a rule they cannot check."""
    oracle = verdict.oracle
    if oracle == "contract":
        expect = verdict.expect
        if isinstance(expect, Refuses) and not expect.raised:
            return ACCEPTED.format(call='run("guilty")', rule=expect)
        if isinstance(expect, Present):
            names = [_OF_LINEAR.get(name, name) for name in expect.names]
            return _MISSING.format(names=names)
        return check_raises(verdict, 'run("guilty")')
    if oracle == "O1":
        return _EQUAL.format(first="guilty", second="guilty", between=POISON)
    if oracle in ("O8", "O12"):
        return _EQUAL.format(first="eager", second="guilty", between="")
    if oracle == "O22":
        return _OWN.format(
            last=MODELS[spec.model].last, allowed=allowed(spec.dtype, autocast=spec.autocast),
            largest=largest(spec.dtype), tiny=FORMATS[spec.dtype].min_normal,
        )  # fmt: skip
    if oracle == "R23":
        return _ADDED.format(microbatches=spec.microbatches)
    if oracle == "O9":
        return _ratio(spec, verdict)
    if oracle in ELEMENT_RULES and spec.direct:
        name = _OF_LINEAR.get(verdict.role, verdict.role)
        return check_element(verdict, f'run("guilty")["{name}"]{list(verdict.at.index)}.item()')
    raise ValueError(f"no stand-alone script for {oracle} on a model")


def _ratio(spec: Spec, verdict: Verdict) -> str:
    """O9's own limit: the same multiple of eager's error, the same floor."""
    at, (large, floor) = verdict.at, ratio_limit(spec)
    row = str(at.index[0]) if isinstance(verdict.expect, Near) and at.index else ""
    ratio = f"{SMALL_RATIO} if guilty.numel() < {SMALL} else {large}"
    return _RATIO.format(
        name=at.name, part=row or "...", ratio=SMALL_RATIO if row else ratio, floor=floor
    )
