"""Two towers, images and words, a learned temperature, and the contrastive loss."""

import torch
import torch.nn.functional as F
from torch import nn


class ImageTower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        )  # fmt: skip
        self.proj = nn.Linear(32, dim)

    def forward(self, x):
        return self.proj(self.stem(x).mean((-2, -1)))


class TextTower(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.proj = nn.Linear(dim, dim)

    def forward(self, ids):
        return self.proj(self.embedding(ids))


class CLIP(nn.Module):
    def __init__(self, vocab=128, dim=32):
        super().__init__()
        self.image, self.text = ImageTower(dim), TextTower(vocab, dim)
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))

    def forward(self, image, text):
        i = F.normalize(self.image(image), dim=-1)
        t = F.normalize(self.text(text), dim=-1)
        logits = self.logit_scale.exp() * i @ t.t()
        target = torch.arange(len(logits), device=logits.device)
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
        return loss, logits


def build():
    torch.manual_seed(0)
    return CLIP(), (torch.randn(8, 3, 16, 16), torch.randint(128, (8, 12)))
