"""torchtitan 0.1's own Llama 3, as its trainer builds it: token ids in, logits out.

Its smallest configuration, made smaller, and its own selective checkpoint around every block.
"""

import dataclasses

import torch
from torch import nn
from torchtitan.config_manager import ActivationCheckpoint
from torchtitan.models import llama3
from torchtitan.models.llama3.infra.parallelize import apply_ac


def build():
    args = dataclasses.replace(
        llama3.llama3_configs["debugmodel"], vocab_size=256, dim=64, n_heads=4, n_layers=2,
        max_seq_len=64,
    )  # fmt: skip
    model = llama3.Transformer(args)
    model.init_weights()
    for parameter in model.parameters():  # the rotations are complex, and stay so
        parameter.data = parameter.data.to(torch.bfloat16)
    return model, torch.randint(args.vocab_size, (2, 32))


class Loss(nn.Module):
    """The model and the loss that its trainer takes."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, labels):
        logits = self.model(ids)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def checkpointed():
    model, ids = build()
    apply_ac(model, ActivationCheckpoint(mode="selective", selective_ac_option="op"))
    return Loss(model), {"ids": ids, "labels": torch.randint(256, ids.shape)}
