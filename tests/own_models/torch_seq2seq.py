"""nn.Transformer: encoder, decoder, a causal mask for the targets, and a generator."""

import torch
from torch import nn


class Translator(nn.Module):
    def __init__(self, vocab=256, dim=64, heads=4):
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, dim), nn.Embedding(vocab, dim)
        self.transformer = nn.Transformer(
            dim, heads, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=128,
            dropout=0.0, batch_first=True,
        )  # fmt: skip
        self.generator = nn.Linear(dim, vocab)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(
            target.shape[1], device=target.device, dtype=self.generator.weight.dtype
        )
        h = self.transformer(
            self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True
        )
        return self.generator(h)


def build():
    return Translator(), (torch.randint(256, (2, 20)), torch.randint(256, (2, 16)))
