"""Models of ``timm``, made small by their classes' arguments: no weights, no network."""

import cpu_torchvision  # noqa: F401  # before timm
import torch
from timm.models.convnext import ConvNeXt
from timm.models.mlp_mixer import MlpMixer
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer


def pictures(model, size=16):
    return model.train(), torch.randn(4, 3, size, size)


def vit(drop_path_rate=0.0):
    return pictures(VisionTransformer(
        img_size=16, patch_size=4, embed_dim=64, depth=2, num_heads=2, num_classes=32,
        drop_path_rate=drop_path_rate,
    ))  # fmt: skip


def vit_drop_path():
    """One block in five is skipped for each picture, at random."""
    return vit(0.2)


def vit_rich():
    """LayerScale, norms on q and k, register tokens, average pooling."""
    return pictures(VisionTransformer(
        img_size=16, patch_size=4, embed_dim=64, depth=2, num_heads=2, num_classes=32,
        init_values=1e-5, qk_norm=True, reg_tokens=2, class_token=False, global_pool="avg",
        fc_norm=True,
    ))  # fmt: skip


def mixer():
    return pictures(MlpMixer(
        img_size=16, patch_size=4, num_classes=32, num_blocks=2, embed_dim=64,
    ))  # fmt: skip


def convnext():
    """Convolutions, LayerNorm and linears on channels."""
    return pictures(ConvNeXt(depths=(1, 1, 1, 1), dims=(16, 16, 32, 32), num_classes=32), 32)


def swin():
    """Shifted windows: a table of relative positions, and masks kept as buffers."""
    return pictures(SwinTransformer(
        img_size=32, patch_size=2, embed_dim=32, depths=(2, 2), num_heads=(2, 4), window_size=4,
        num_classes=32, drop_path_rate=0.0,
    ), 32)  # fmt: skip
