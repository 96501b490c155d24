"""A sentence encoder for batches of unequal length: called by name, with a padding mask."""

import torch
import torch.nn.functional as F
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, keep):
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for w in (self.q, self.k, self.v))  # fmt: skip
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])
        return self.o(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attention = SelfAttention(dim, heads)
        self.norm1 = nn.LayerNorm(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, x, keep):
        x = self.norm1(x + self.attention(x, keep))
        return self.norm2(x + self.ffn(x))


class Encoder(nn.Module):
    """Mean of the tokens that are no padding, and class scores, in a dict."""

    def __init__(self, vocab=300, dim=64, heads=4, depth=2, classes=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.position = nn.Parameter(0.02 * torch.randn(64, dim))
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(depth))
        self.classifier = nn.Linear(dim, classes)

    def forward(self, input_ids, attention_mask):
        keep = attention_mask.bool()
        x = self.embed(input_ids) + self.position[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x, keep)
        weight = keep.unsqueeze(-1).to(x.dtype)
        pooled = (x * weight).sum(1) / weight.sum(1).clamp(min=1)
        return {"embedding": F.normalize(pooled, dim=-1), "logits": self.classifier(pooled)}


def build():
    torch.manual_seed(0)
    lengths = torch.tensor([32, 20, 7, 1])
    mask = (torch.arange(32) < lengths[:, None]).long()
    ids = torch.randint(1, 300, (4, 32)) * mask
    return Encoder().bfloat16(), {"input_ids": ids, "attention_mask": mask}
