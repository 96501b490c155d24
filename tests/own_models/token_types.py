"""BERT's embeddings: words, positions and two types of token, then post-norm layers."""

import torch
import torch.nn.functional as F
from torch import nn


class Embeddings(nn.Module):
    def __init__(self, vocab, dim, max_len=64, types=2):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, dim, padding_idx=0)
        self.position_embeddings = nn.Embedding(max_len, dim)
        self.token_type_embeddings = nn.Embedding(types, dim)
        self.LayerNorm = nn.LayerNorm(dim, eps=1e-12)
        self.register_buffer("position_ids", torch.arange(max_len).expand((1, -1)))

    def forward(self, input_ids, token_type_ids):
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        x = x + self.position_embeddings(self.position_ids[:, : input_ids.shape[1]])
        return self.LayerNorm(x)


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.dense = nn.Linear(dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.intermediate, self.output = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for w in (self.query, self.key, self.value))  # fmt: skip
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = self.norm1(x + self.dense(y))
        return self.norm2(x + self.output(F.gelu(self.intermediate(x))))


class Pairs(nn.Module):
    def __init__(self, vocab=500, dim=64, heads=2, depth=2):
        super().__init__()
        self.embeddings = Embeddings(vocab, dim)
        self.layers = nn.ModuleList([Layer(dim, heads) for _ in range(depth)])
        self.pooler, self.classifier = nn.Linear(dim, dim), nn.Linear(dim, 32)

    def forward(self, input_ids, token_type_ids):
        x = self.embeddings(input_ids, token_type_ids)
        for layer in self.layers:
            x = layer(x)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


def build():
    torch.manual_seed(0)
    types = (torch.arange(32) >= 14).long().expand(2, -1)
    ids = torch.randint(500, (2, 32))
    return Pairs().bfloat16(), {"input_ids": ids, "token_type_ids": types}
