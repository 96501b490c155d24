"""Two small blocks as DeepSeek-V3 has them: a router with a bias counts its tokens, one expert is
shared."""

import torch
import torch.nn.functional as F
from torch import nn


class Router(nn.Module):
    def __init__(self, dim, experts, k):
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.k = k
        self.register_buffer("expert_bias", torch.zeros(experts, dtype=torch.float32))
        self.register_buffer("tokens_per_expert", torch.zeros(experts, dtype=torch.float32))

    def forward(self, x):
        scores = torch.sigmoid(self.gate(x).float())
        _, chosen = torch.topk(scores + self.expert_bias, k=self.k, dim=-1)
        top = scores.gather(1, chosen)
        top = top / (top.sum(-1, keepdim=True) + 1e-20) * 2.5
        counts = torch.bincount(chosen.flatten(), minlength=scores.shape[1])
        if self.training:
            with torch.no_grad():
                self.tokens_per_expert.add_(counts)
        return top, chosen, counts


class Experts(nn.Module):
    def __init__(self, dim, hidden, experts):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, dim, hidden) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, dim) * hidden**-0.5)
        self.w3 = nn.Parameter(torch.randn(experts, dim, hidden) * dim**-0.5)

    def forward(self, x, counts):
        offs = torch.cumsum(counts, 0, dtype=torch.int32)
        h = F.silu(torch._grouped_mm(x.bfloat16(), self.w1.bfloat16(), offs=offs))
        h = h * torch._grouped_mm(x.bfloat16(), self.w3.bfloat16(), offs=offs)
        return torch._grouped_mm(h, self.w2.bfloat16(), offs=offs).type_as(x)


class MoE(nn.Module):
    def __init__(self, dim, hidden, experts, k):
        super().__init__()
        self.router, self.experts = Router(dim, experts, k), Experts(dim, hidden, experts)
        self.shared = nn.Sequential(
            nn.Linear(dim, hidden, bias=False), nn.SiLU(), nn.Linear(hidden, dim, bias=False)
        )
        self.k = k

    def forward(self, x):
        b, s, d = x.shape
        flat = x.reshape(-1, d)
        top, chosen, counts = self.router(flat)
        order = torch.argsort(chosen.flatten(), stable=True)
        scores = top.flatten()[order]
        rows = order // self.k
        routed = (flat[rows].float() * scores[:, None]).to(x.dtype)
        out = self.experts(routed, counts)
        y = self.shared(flat)
        y = y.scatter_add(0, rows[:, None].expand(-1, d), out)
        return y.reshape(b, s, d)


class Block(nn.Module):
    def __init__(self, dim=64, heads=4, hidden=96, experts=8, k=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.moe = MoE(dim, hidden, experts, k)

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d)
        )
        return x + self.moe(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(256, 64)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.RMSNorm(64), nn.Linear(64, 256, bias=False)

    def forward(self, ids):
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build():
    torch.manual_seed(0)
    return Model().bfloat16(), (torch.randint(0, 256, (2, 32)),)
