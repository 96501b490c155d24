"""TransformerEngine's router, its auxiliary loss, and its movement of tokens to experts and back,
as models and scripts call them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class TeExperts(nn.Module):
    """Rows that TransformerEngine's router sends to experts, each of which multiplies them by a row
    of its own, and that are added up again with the router's weights. Features are padded with
    zeros to whole 16 bytes. An auxiliary loss adds to the gradient, but not to the output: an even
    number of rows are two sequences with a loss each. The rows come in two halves.

    ``moves`` is how rows move: "index", "index_dropping" (the last quarter of them is dropped),
    "mask", "mask_with_probs" (the weights move along), or "padded" (each expert's rows are padded
    to a multiple of 16). At most ``most`` rows move, and others are returned as they are. ``how``
    are the router's options.
    """

    def __init__(
        self, dim: int, experts: int, topk: int, moves: str, most: int, how: dict[str, Any]
    ) -> None:
        super().__init__()
        prepare_te(moves)
        self.topk, self.moves, self.most, self.how = topk, moves, most, how
        self.padding = -dim % 8 if dim else 8
        self.router = nn.Parameter(torch.randn(experts, dim + self.padding))
        self.scale = nn.Parameter(torch.randn(experts, dim + self.padding))
        bias = (
            None if how["score_function"] == "softmax" else torch.linspace(-0.125, 0.125, experts)
        )
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise NotImplementedError("TransformerEngine's router takes no float64")
        rows = F.pad(x.reshape(x.shape[:-1].numel(), x.shape[-1]), (0, self.padding))
        halves = rows[: self.most].tensor_split(2)
        parts = [self.routed(half) for half in halves if len(half)]
        return torch.cat([*parts, rows[self.most :]])[:, : x.shape[-1]].reshape(x.shape)

    def routed(self, rows: torch.Tensor) -> torch.Tensor:
        """One half of the rows, through their experts."""
        from transformer_engine.pytorch import router

        logits = rows @ self.router.t()
        bias = None if self.bias is None else self.bias.float()
        probs, chosen = router.fused_topk_with_score_function(
            logits, self.topk, expert_bias=bias, **self.how
        )
        kind = self.how["score_function"]
        _, scores = router.fused_compute_score_for_moe_aux_loss(logits, self.topk, kind)
        experts, sequences = len(self.router), 1 + (len(rows) % 2 == 0)
        counts = chosen.reshape(-1, sequences * experts).sum(0)
        loss = router.fused_moe_aux_loss(
            scores.reshape(-1, len(counts)), counts, len(rows), experts, self.topk, 1.0
        )
        return self.moved(rows, probs, chosen) + (loss - loss.detach()).to(rows.dtype)

    def moved(self, rows: torch.Tensor, probs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The rows at their experts, multiplied, and back."""
        from transformer_engine.pytorch import permutation

        if self.moves.startswith("index"):
            # rows with NaN may have fewer chosen experts: others fill up
            index = chosen.int().argsort(dim=1, descending=True, stable=True)[:, : self.topk]
            experts = index.reshape(-1)
            order = experts.argsort(stable=True)
            count = len(experts) * 3 // 4 if self.moves == "index_dropping" else 0
            sent, places = permutation.moe_permute(rows, index.int(), count, map_type="index")
            y = sent * self.scale.index_select(0, experts[order[: len(sent)]])
            weights = probs.gather(1, index).float()
            return permutation.moe_unpermute(y, places, weights, map_type="index")
        experts = chosen.nonzero()[:, 1].sort().values
        sizes = {"restore_shape": rows.shape}
        mask, scale = chosen.int(), self.scale.index_select(0, experts)
        if self.moves == "mask":
            sent, places = permutation.moe_permute(rows, mask, len(experts))
            return permutation.moe_unpermute(sent * scale, places, probs, **sizes)
        if self.moves == "mask_with_probs":
            sent, weights, places = permutation.moe_permute_with_probs(
                rows, probs, mask, len(experts)
            )
            y = sent * scale * weights[:, None]
            return permutation.moe_unpermute(y, places, **sizes)
        sent, weights, places, pads, ends = permutation.moe_permute_and_pad_with_probs(
            rows, probs, mask, mask.sum(0), 16
        )
        every = torch.arange(len(self.scale), device=rows.device).repeat_interleave(ends)
        y = sent * self.scale.index_select(0, every) * weights[:, None]
        return permutation.moe_unpermute(y, places, pad_offsets=pads, **sizes)


def prepare_te(moves: str = "") -> None:
    """Make TransformerEngine importable: on a CPU its extension is emulated, and movement by a mask
    is Triton's, which its interpreter runs."""
    if not torch.cuda.is_available():
        from te_on_cpu.environment import enter

        if moves and not moves.startswith("index"):
            import triton_on_cpu

            triton_on_cpu.install()
        enter()
    # a watch replaces functions that are imported before the model runs
    import transformer_engine.pytorch.permutation
    import transformer_engine.pytorch.router  # noqa: F401


def te_router(
    input: torch.Tensor, bias: torch.Tensor | None, grad_output: torch.Tensor | None, **how: Any
) -> tuple[torch.Tensor, ...]:
    """Each expert's weight, which experts were chosen, and with a ``grad_output`` of the weights
    the gradient of ``input``, the logits."""
    prepare_te()
    from transformer_engine.pytorch.router import fused_topk_with_score_function

    given = input.detach().requires_grad_()
    probs, chosen = fused_topk_with_score_function(given, expert_bias=bias, **how)
    return (probs.detach(), chosen.float(), *_gradient(probs, grad_output, given))


def te_scores(
    input: torch.Tensor, grad_output: torch.Tensor | None, topk: int, score_function: str
) -> tuple[torch.Tensor, ...]:
    """Each expert's score for the auxiliary loss, which experts were chosen, and with a
    ``grad_output`` of the scores the gradient of ``input``, the logits."""
    prepare_te()
    from transformer_engine.pytorch.router import fused_compute_score_for_moe_aux_loss

    given = input.detach().requires_grad_()
    chosen, scores = fused_compute_score_for_moe_aux_loss(given, topk, score_function)
    return (scores.detach(), chosen.float(), *_gradient(scores, grad_output, given))


def te_aux_loss(
    input: torch.Tensor, counts: torch.Tensor, grad_output: torch.Tensor | None, *how: Any
) -> tuple[torch.Tensor, ...]:
    """The auxiliary loss of probabilities and numbers of tokens, and with a ``grad_output`` the
    gradient of the probabilities, ``input``."""
    prepare_te()
    from transformer_engine.pytorch.router import fused_moe_aux_loss

    given = input.detach().requires_grad_()
    loss = fused_moe_aux_loss(given, counts, *how)
    return (loss.detach(), *_gradient(loss, grad_output, given))


def _gradient(
    output: torch.Tensor, grad_output: torch.Tensor | None, given: torch.Tensor
) -> tuple[Any, ...]:
    if grad_output is None:
        return ()
    output.backward(grad_output)
    return (given.grad,)


def te_moves(name: str, *given: Any) -> Any:
    """What TransformerEngine's kernel of this name returns."""
    prepare_te("mask" if "mask" in name else "")
    return getattr(torch.ops.te_moe, name)(*given)
