"""Two Swin blocks: windows, shifted ones with a mask, biases by relative position, and dropout."""

import torch
from torch import nn


def window_partition(x, w):
    B, H, W, C = x.shape
    x = x.view(B, H // w, w, W // w, w, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, w, w, C)


def window_reverse(windows, w, H, W):
    B = int(windows.shape[0] / (H * W / w / w))
    x = windows.view(B, H // w, W // w, w, w, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)


class WindowAttention(nn.Module):
    def __init__(self, dim, w, heads, drop=0.1):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * w - 1) ** 2, heads))
        coords = torch.stack(
            torch.meshgrid(torch.arange(w), torch.arange(w), indexing="ij")
        ).flatten(1)
        rel = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous()
        rel[:, :, 0] += w - 1
        rel[:, :, 1] += w - 1
        rel[:, :, 0] *= 2 * w - 1
        self.register_buffer("relative_position_index", rel.sum(-1))
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop = nn.Dropout(drop), nn.Dropout(drop)
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def forward(self, x, mask=None):
        B_, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B_, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(
            N, N, -1
        )
        attn = attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        if mask is not None:
            nW = mask.shape[0]
            attn = attn.view(B_ // nW, nW, self.heads, N, N) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.heads, N, N)
        attn = self.attn_drop(attn.softmax(-1))
        return self.proj_drop(self.proj((attn @ v).transpose(1, 2).reshape(B_, N, C)))


class SwinBlock(nn.Module):
    def __init__(self, dim, res, heads, w, shift):
        super().__init__()
        self.res, self.w, self.shift = res, w, shift
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, w, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        mask = None
        if shift:
            img = torch.zeros(1, res, res, 1)
            cnt = 0
            for h in (slice(0, -w), slice(-w, -shift), slice(-shift, None)):
                for v in (slice(0, -w), slice(-w, -shift), slice(-shift, None)):
                    img[:, h, v, :] = cnt
                    cnt += 1
            mw = window_partition(img, w).view(-1, w * w)
            m = mw.unsqueeze(1) - mw.unsqueeze(2)
            mask = m.masked_fill(m != 0, -100.0).masked_fill(m == 0, 0.0)
        self.register_buffer("attn_mask", mask)

    def forward(self, x):
        B, L, C = x.shape
        H = W = self.res
        h = self.norm1(x).view(B, H, W, C)
        if self.shift:
            h = torch.roll(h, (-self.shift, -self.shift), (1, 2))
        h = window_partition(h, self.w).view(-1, self.w * self.w, C)
        h = window_reverse(self.attn(h, self.attn_mask).view(-1, self.w, self.w, C), self.w, H, W)
        if self.shift:
            h = torch.roll(h, (self.shift, self.shift), (1, 2))
        x = x + h.reshape(B, L, C)
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    def __init__(self, dim=32, res=8, heads=2, w=4):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 2, 2)
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList(
            [SwinBlock(dim, res, heads, w, 0), SwinBlock(dim, res, heads, w, w // 2)]
        )
        self.head = nn.Linear(dim, 16)

    def forward(self, img):
        x = self.norm(self.patch(img).flatten(2).transpose(1, 2))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def build():
    torch.manual_seed(0)
    return Swin().bfloat16(), torch.randn(2, 3, 16, 16, dtype=torch.bfloat16)
