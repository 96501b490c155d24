"""Script text that watches a model from inside: attention's arguments, what GEMMs multiply.

Inside Inductor's graphs a dispatch mode sees the kernels that are called.
"""

from __future__ import annotations

from narrowfuzz.arms.ladder import Arm
from narrowfuzz.expect import Own, read
from narrowfuzz.verdict import Verdict

_WATCH = """
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
forwards, backwards, aten = [], [], torch.ops.aten
class Watch(TorchDispatchMode, contextlib.ContextDecorator):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(is_traceable_wrapper_subclass(a) for a in args if isinstance(a, torch.Tensor)):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product_flash_attention"):
            if name.endswith("_backward"):
                backwards.append([t.clone() for t in args[1:6]])
            else:
                forwards.append([t.clone() for t in (*args[:3], *result[:2])])
        return result
"""

#: Inside what the compiler made, so that it makes what it would.
_INSIDE_INDUCTOR = """
from torch._inductor.output_code import CompiledFxGraph
CompiledFxGraph.__call__ = Watch()(CompiledFxGraph.__call__)
"""
_INSIDE_GRAPHS = """
from torch._dynamo.backends import debugging
def watched(graph, inputs, make=debugging.boxed_nop):
    return Watch()(make(graph, inputs))
debugging.boxed_nop = watched
"""

_STATISTICS = """
def plain(t):
    return t.double().nan_to_num(nan=0.5)
def different(x, y):
    return int((plain(x) != plain(y)).sum()) if x.shape == y.shape else x.numel()
lost = moved = worst = 0
for q, k, v, out, lse in backwards:
    kept = [f for f in forwards if not different(f[4], lse) and not different(f[3], out)]
    lost += not kept
    for i, x in enumerate((q, k, v)):
        moved += min((different(x, f[i]) for f in kept), default=0)
    scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    total = (scores - lse.double().reshape(scores.shape[:-1]).unsqueeze(-1)).exp().sum(-1)
    worst = max(worst, (total - 1).abs().max().item())
print(f"{len(backwards)} attention backwards, {lost} with statistics of no forward; elements of "
      f"q, k, v that moved since: {moved}; rows of probabilities sum to 1 within {worst:.2g}")
sys.exit(1 if lost or moved or worst > ALLOWED else 0)
"""

_WATCH_GEMMS = """
from torch.utils._python_dispatch import TorchDispatchMode
forwards, backwards = [], []
class Watch(TorchDispatchMode, contextlib.ContextDecorator):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        result = func(*args, **kwargs)
        if name in ("mm", "addmm", "_scaled_mm"):
            a, b = args[1:3] if name == "addmm" else args[:2]
            scales = (*args[2:4], kwargs.get("scale_a"), kwargs.get("scale_b"))
            sa, sb = [s for s in scales if s is not None][:2] if "_" in name else (a[:0], b[:0])
            bias = args[0] if name == "addmm" else kwargs.get("bias", next(iter(args[4:]), None))
            in_backward = torch._C._current_graph_task_id() != -1
            told = [None if t is None else t.detach().float().clone()
                    for t in (b, sb, a, sa, result, bias)]
            (backwards if in_backward else forwards).append([*told, result.dtype])
        return result
"""

#: A GEMM of backward with a forward GEMM's weight is that GEMM again.
_RECOMPUTED = """
def plain(t):
    return t.nan_to_num(nan=0.5) + 0.0
def equal(xs, ys):
    return all(x.shape == y.shape and torch.equal(plain(x), plain(y)) for x, y in zip(xs, ys))
moved = repeated = 0
for b, sb, a, sa, *_ in backwards:
    first = [f for f in forwards if equal((b, sb), f[:2])]
    if first and not (b.shape[0] == b.shape[1] and torch.equal(b, b.t())):
        repeated += 1
        moved += not any(equal((a, sa), f[2:4]) for f in first)
print(f"{repeated} products computed again in backward, {moved} of them from other operands")
sys.exit(1 if moved else 0)
"""

#: Every product against float64: K + 3 roundings of fp32 in any order, then those of the result.
_PRODUCTS = """
worst = 0.0
for b, sb, a, sa, result, bias, kind in PRODUCTS:
    a, b = (t.double() * (s.double() if s.numel() else 1.0) for t, s in ((a, sa), (b, sb)))
    added = torch.zeros(()) if bias is None else bias.double()
    size, n = a.abs() @ b.abs(), (a.shape[1] + 3) * 2.0**-24
    exact, radius = a @ b + added, n / (1 - n) * size + (a.shape[1] + 1) * 2.0**-126
    allowed = radius + torch.finfo(kind).eps * (exact.abs() + added.abs() + radius)
    far = ((result.double() - exact).abs() / allowed)[size + added.abs() < torch.finfo(kind).max]
    worst = max([worst, *far.nan_to_num(nan=math.inf).flatten().tolist()])
print(f"{len(PRODUCTS)} products; the worst is off by {worst:.3g} of what any order of sums allows")
sys.exit(1 if worst > 1.0 else 0)
"""


def inside(arm: Arm) -> str:
    """Text that runs what a compiler makes inside the script's ``Watch()``."""
    return _INSIDE_INDUCTOR if arm.compiler == "inductor" else _INSIDE_GRAPHS


def watching(verdict: Verdict, arm: Arm) -> tuple[str, bool]:
    """Text that records what the rule looks at, and whether ``Watch()`` must surround the run.

    Raises ValueError for what a plain script cannot see.
    """
    if verdict.at.what == "product":
        return _WATCH_GEMMS + inside(arm), False
    if verdict.oracle not in ("O13", "O18"):
        return "", False
    if verdict.oracle == "O18":
        return _WATCH + (inside(arm) if arm.compiler else ""), not arm.compiler
    if not arm.compiler:
        raise ValueError("what a recomputed layer gets is the player's to show")
    return _WATCH_GEMMS + inside(arm), False


def check_watched(verdict: Verdict, arm: Arm) -> str:
    """Run, and check what was recorded."""
    if verdict.at.what == "product":
        products = "forwards" if verdict.oracle == "O5" else "backwards"
        return 'run("guilty")\n' + _PRODUCTS.strip().replace("PRODUCTS", products)
    if verdict.oracle == "O13":
        return 'run("guilty")\n' + _RECOMPUTED.strip()
    # where q, k or v moved, the sums may well have stayed
    limit = verdict.expect.limit if isinstance(verdict.expect, Own) else ""
    allowed = repr(read(limit)) if limit else "math.inf"
    return 'run("guilty")\n' + _STATISTICS.strip().replace("ALLOWED", allowed)
