"""Graph attention by hand: a softmax over the edges of each node, by scatter_reduce and index_add.
One node has no edge."""

import torch
import torch.nn.functional as F
from torch import nn


def segment_softmax(e, dst, n):
    m = e.new_full((n, e.shape[1]), float("-inf")).scatter_reduce(
        0, dst[:, None].expand_as(e), e, "amax"
    )
    m = torch.where(torch.isinf(m), torch.zeros_like(m), m)
    ex = (e - m[dst]).exp()
    z = e.new_zeros(n, e.shape[1]).index_add(0, dst, ex)
    return ex / (z[dst] + 1e-16)


class GATConv(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.lin = nn.Linear(dim, dim, bias=False)
        self.att_src, self.att_dst = (
            nn.Parameter(torch.randn(1, heads, self.hd) * 0.3) for _ in range(2)
        )
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x, edge_index):
        src, dst = edge_index
        h = self.lin(x).view(-1, self.heads, self.hd)
        a = (h * self.att_src).sum(-1)[src] + (h * self.att_dst).sum(-1)[dst]
        w = segment_softmax(F.leaky_relu(a, 0.2), dst, x.shape[0])
        out = torch.zeros_like(h).index_add(0, dst, h[src] * w.unsqueeze(-1))
        return out.flatten(1) + self.bias


class GNN(nn.Module):
    def __init__(self, dim=64, heads=4, classes=16):
        super().__init__()
        self.convs = nn.ModuleList([GATConv(dim, heads), GATConv(dim, heads)])
        self.edge_mlp = nn.Sequential(nn.Linear(2 * dim, 64), nn.ReLU(), nn.Linear(64, 16))
        self.lin = nn.Linear(dim, classes)

    def forward(self, x, edge_index, train_mask):
        for c in self.convs:
            x = F.elu(c(x, edge_index))
        pooled = x.amax(0)
        edges = self.edge_mlp(torch.cat([x[edge_index[0]], x[edge_index[1]]], -1))
        return self.lin(x)[train_mask], edges, self.lin(pooled[None])


def build():
    g = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 31, (2, 96), generator=g)
    torch.manual_seed(0)
    return GNN(), (torch.randn(32, 64), edges, torch.rand(32) > 0.5)
