"""Models that consist of a single operator with learned operands, so that a failure in one is that
operator's. Scripts build them from this source."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Scaled(nn.Module):
    """Every feature times a weight, plus a bias, whose gradients are sums over the rows; plus the
    sum of each row."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.bias + x.sum(-1, keepdim=True)


class Normalised(nn.Module):
    """A normalisation by itself; with ``mixed``, of a bf16 input with fp32 parameters, as it gets
    the output of a linear under autocast."""

    def __init__(self, norm: str, dim: int, mixed: bool) -> None:
        super().__init__()
        self.mixed = mixed
        self.norm = nn.RMSNorm(dim, eps=1e-5) if norm == "rms" else nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        narrow = self.mixed and x.dtype == torch.float32
        return self.norm(x.bfloat16() if narrow else x).to(x.dtype)


class NormalisedByHand(nn.Module):
    """An RMS norm as models write it out, or with ``centred`` a layer norm without a bias."""

    def __init__(self, dim: int, centred: bool) -> None:
        super().__init__()
        self.centred = centred
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x - x.mean(-1, keepdim=True) if self.centred else x
        return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Products(nn.Module):
    """Each head of a row times a matrix of its own, as for experts that get equally many rows."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(heads, dim // heads, dim // heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads, width, _ = self.weight.shape
        rows = x.reshape(-1, heads, width).transpose(0, 1)
        return torch.bmm(rows, self.weight).transpose(0, 1).reshape(x.shape)


class Product(nn.Module):
    """Rows times a matrix that is not in a linear, plus a bias row if ``bias``."""

    def __init__(self, dim: int, columns: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, columns))
        self.bias = nn.Parameter(torch.randn(columns)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = rows @ self.weight if self.bias is None else torch.addmm(self.bias, rows, self.weight)
        return y.reshape(*x.shape[:-1], -1)


class AttendsFlexibly(nn.Module):
    """Attention by FlexAttention, forward only (a CPU has no backward), with a block mask:
    ``causal``, ``documents`` of eight rows each, or none."""

    def __init__(self, dim: int, columns: int, heads: int, shared: int, mask: str) -> None:
        super().__init__()
        self.heads, self.shared, self.mask = heads, shared, mask
        self.key = nn.Parameter(torch.randn(heads // shared, columns, dim // heads))
        self.value = nn.Parameter(torch.randn(heads // shared, columns, dim // heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        batched = x if x.dim() == 3 else x.unsqueeze(0)
        q = batched.reshape(*batched.shape[:2], self.heads, -1).transpose(1, 2)
        k, v = (t.expand(len(batched), *t.shape) for t in (self.key, self.value))
        # a view of a parameter asks for a gradient in no_grad, too, which no CPU has
        q, k, v = q.clone(), k.clone(), v.clone()
        block = None
        if self.mask:
            causal = self.mask == "causal"
            sees = lambda b, h, i, j: i >= j if causal else i // 8 == j // 8  # noqa: E731
            block = create_block_mask(sees, None, None, q.shape[2], k.shape[2], x.device)
        y = flex_attention(q, k, v, block_mask=block, enable_gqa=self.shared > 1)
        return y.transpose(1, 2).reshape(x.shape)


class AttendsByHand(nn.Module):
    """Attention as models write it out: products, softmax, products; causal."""

    def __init__(self, dim: int, columns: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.key = nn.Parameter(torch.randn(heads, columns, dim // heads))
        self.value = nn.Parameter(torch.randn(heads, columns, dim // heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = self.key.shape[-1]
        q = x.reshape(-1, self.heads, width).transpose(0, 1)
        scores = q @ self.key.transpose(1, 2) / width**0.5
        rows, columns = scores.shape[1:]
        ahead = torch.ones(rows, columns, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(ahead, float("-inf")).softmax(-1)
        return (weights @ self.value).transpose(0, 1).reshape(x.shape)


class Probabilities(nn.Module):
    """softmax (with ``log``, log_softmax) of each row of features times a weight."""

    def __init__(self, dim: int, log: bool) -> None:
        super().__init__()
        self.log = log
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x * self.weight
        return F.log_softmax(scores, -1) if self.log else F.softmax(scores, -1)


class CrossEntropy(nn.Module):
    """The cross entropy of rows of logits and fixed targets, every ``ignored``-th of which is
    ignored, in the shape of the logits. With ``weighted``, classes weigh 1, 2, 3, 1, 2, 3, ...;
    with ``outside``, the last target is no class."""

    def __init__(self, classes: int, reduction: str, ignored: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.reduction, self.ignored, self.options = reduction, ignored, options
        self.weight = nn.Parameter(torch.ones(classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = (x * self.weight).reshape(-1, x.shape[-1])
        rows = torch.arange(len(logits), device=x.device)
        target = torch.where(rows % self.ignored == 0, -100, rows * 7 % x.shape[-1])
        how: dict[str, Any] = {"reduction": self.reduction, **self.options}
        if how.pop("outside", False):
            target = torch.where(rows == len(rows) - 1, x.shape[-1], target)
        if how.pop("weighted", False):
            how["weight"] = (torch.arange(x.shape[-1], device=x.device) % 3 + 1).to(x.dtype)
        return F.cross_entropy(logits, target, **how).expand(x.shape)


class LinearCrossEntropy(nn.Module):
    """The mean cross entropy of the outputs of a linear, in chunks of 16 rows; every ``ignored``-th
    target is ignored. Expanded to the shape of its input."""

    def __init__(self, dim: int, classes: int, ignored: int) -> None:
        super().__init__()
        self.ignored = ignored
        # compiled, torch would warn that it allows a second backward, and a warning breaks graphs
        self.options = nn.LinearCrossEntropyOptions(
            allow_retain_graph=True, batch_chunk_size=16, chunking_method=None
        )
        self.weight = nn.Parameter(torch.randn(classes, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(x.numel() // x.shape[-1], device=x.device)
        target = torch.where(rows % self.ignored == 0, -100, rows * 7 % len(self.weight))
        flat = x.reshape(len(rows), -1)
        return F.linear_cross_entropy(flat, self.weight, target, options=self.options).expand(
            x.shape
        )


class Lookup(nn.Module):
    """Rows of a table by their ids."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(rows, dim))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.table)


class Indexed(nn.Module):
    """Rows of a table by their ids, by indexing."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(rows, dim))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids]


class Collects(nn.Module):
    """Rows are added up by the group that each belongs to, as experts' outputs are by token, and
    each row gets the sum of its group; with ``flat``, single numbers instead of rows. A third
    belongs to the first group."""

    def __init__(self, dim: int, groups: int, add: str, flat: bool) -> None:
        super().__init__()
        self.groups, self.add, self.flat = groups, add, flat
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x * self.weight).reshape(-1, *(() if self.flat else x.shape[-1:]))
        number = torch.arange(len(rows), device=x.device)
        groups = torch.where(number % 3 == 0, 0, number * 7 % self.groups)
        sums = rows.new_zeros(self.groups, *rows.shape[1:])
        if self.add == "index_add":
            return sums.index_add(0, groups, rows).index_select(0, groups).reshape(x.shape)
        places = groups.reshape(-1, *[1] * (rows.dim() - 1)).expand(rows.shape)
        return sums.scatter_add(0, places, rows).gather(0, places).reshape(x.shape)


class Chosen(nn.Module):
    """Features times a weight; each row retains only its ``count`` largest, in place, as routers
    choose experts. If ``count`` is 0, each row is sorted stably."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x * self.weight
        if not self.count:
            return scores.sort(dim=-1, stable=True).values
        values, places = scores.topk(self.count, dim=-1)
        return torch.zeros_like(scores).scatter(-1, places, values)


class Activated(nn.Module):
    """Features times a weight, through an elementwise activation function."""

    def __init__(self, dim: int, function: str, how: dict[str, Any]) -> None:
        super().__init__()
        self.function, self.how = function, how
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activate: Any = getattr(F, self.function)
        return activate(x * self.weight, **self.how)  # type: ignore[no-any-return]


class Capped(nn.Module):
    """Features times a weight, capped smoothly at 30 by tanh, as logits are."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.weight / 30.0) * 30.0


class ZLoss(nn.Module):
    """The loss that keeps logits small: the mean over rows of the squared log-sum-exp, in the shape
    of the logits."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(x * self.weight, -1).pow(2).mean().expand(x.shape)


class Attends(nn.Module):
    """Rows attend to ``columns`` learned keys and values; ``shared`` heads of queries share one
    head of these. The mask is one of:

    ``causal``; ``padding``: the last quarter of the keys is masked; ``both`` of these; ``empty``:
    every third row sees no key; ``finite``: every third row's scores get -1e9 added instead;
    ``bias``: scores get a multiple of the distance added, as in ALiBi.
    """

    def __init__(self, dim: int, columns: int, heads: int, shared: int, mask: str) -> None:
        super().__init__()
        self.heads, self.shared, self.mask = heads, shared, mask
        self.key = nn.Parameter(torch.randn(columns, dim // shared))
        self.value = nn.Parameter(torch.randn(columns, dim // shared))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batched = x if x.dim() == 3 else x.unsqueeze(0)
        several = [t.expand(len(batched), *t.shape) for t in (self.key, self.value)]
        q = self.split(batched, self.heads)
        k, v = (self.split(t, self.heads // self.shared) for t in several)
        how: dict[str, Any] = {"enable_gqa": True} if self.shared > 1 else {}
        if self.mask in ("causal", "both"):
            how["is_causal"] = True
        if self.mask not in ("", "causal"):
            how["attn_mask"] = self.masked(batched.shape[1], len(self.key), x)
        y = F.scaled_dot_product_attention(q, k, v, **how)
        return y.transpose(1, 2).reshape(x.shape)

    def split(self, t: torch.Tensor, heads: int) -> torch.Tensor:
        """[batch, rows, dim] -> [batch, heads, rows, dim / heads]."""
        return t.reshape(*t.shape[:2], heads, -1).transpose(1, 2)

    def masked(self, rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
        """The mask [rows, columns], boolean or added to the scores."""
        i = torch.arange(rows, device=like.device)[:, None]
        j = torch.arange(columns, device=like.device)
        if self.mask in ("padding", "both"):
            return (i >= 0) & (j < columns - columns // 4)
        if self.mask == "empty":
            return (i % 3 != 1) & (j >= 0)
        if self.mask == "finite":
            moved = torch.where(i % 3 == 1, -1e9, 0.0) + 0.0 * j
            return moved.to(like.dtype)
        return ((i - j).abs() / -8.0).to(like.dtype)


class ScaledByNorm(nn.Module):
    """Rows divided by their norm of an ``order`` ("2", "1" or "inf") and times a weight; no row is
    divided by less than 2^-10."""

    def __init__(self, dim: int, order: str) -> None:
        super().__init__()
        self.order = float(order)
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, self.order, dim=-1, keepdim=True)
        return x * self.weight / norm.clamp(min=2.0**-10)


class Unscaled(nn.Module):
    """Rows times a weight, plus the same rows as GradScaler unscales them from this ``scale``, as
    if they were a gradient; the latter part has no gradient."""

    def __init__(self, dim: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grad, found = x.detach().clone(), torch.zeros(1, device=x.device)
        inverse = torch.full((1,), self.scale, device=x.device).double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_([grad], found, inverse)
        return x * self.weight + grad


class ManyOperators(nn.Module):
    """Activations, softmaxes and norms, each on its share of the features: one graph that calls
    many operators."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        kinds: list[Any] = [
            lambda share: Activated(share, "gelu", {}),
            lambda share: Activated(share, "gelu", {"approximate": "tanh"}),
            lambda share: Activated(share, "silu", {}),
            lambda share: Activated(share, "sigmoid", {}),
            lambda share: Capped(share),
            lambda share: Probabilities(share, False),
            lambda share: Probabilities(share, True),
            lambda share: Normalised("layer", share, False),
            lambda share: Normalised("rms", share, False),
            lambda share: NormalisedByHand(share, True),
            lambda share: ScaledByNorm(share, "2"),
        ]
        shares = [len(share) for share in torch.arange(dim).tensor_split(len(kinds))]
        self.shares = [share for share in shares if share] or [0]
        self.parts = nn.ModuleList(
            make(share) for make, share in zip(kinds, self.shares, strict=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = zip(self.parts, x.split(self.shares, -1), strict=True)
        return torch.cat([part(piece) for part, piece in pieces], -1)
