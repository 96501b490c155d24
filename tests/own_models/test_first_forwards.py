"""Models whose first forward does what later ones do not are refused with the reason; those that
each forward overwrites are judged."""

from __future__ import annotations

import pytest
from narrowfuzz.own_models import register
from test_own_causes import judged
from test_own_models import Own, own

__all__ = ["own"]  # a fixture

MODEL = """
import numpy as np
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.started = nn.Linear(8, 8), False
        self.register_buffer("mean", torch.zeros(8))
        self.shift = nn.Parameter(torch.zeros(8))
    @torch.no_grad()
    def start(self, x):
        {}
        self.started = True
    def forward(self, x):
        x = x.float().view(-1, 8)
        self.start(x)
        return self.proj(x - self.mean + self.shift)
def build(): return Model(), {}
"""
WAVES = "torch.linspace(-2, 3, 64).view(8, 8).sin()"
#: What it is called with, what a forward does first, and the reason that is given.
REFUSED = {
    "by a flag": (WAVES, "if not self.started: self.mean.copy_(x.mean(0))",
                  "the first forward fills its buffer mean depending on its input"),
    "by a flag, from zeros": ("torch.zeros(8, 8)",
                              "if not self.started: self.mean.copy_(x.mean(0))",
                              "the first forward fills its buffer mean depending on its input"),
    "by a flag, from equal ids": ("torch.zeros(8, 8, dtype=torch.long)",
                                  "if not self.started: self.mean.copy_(x.mean(0))",
                                  "the first forward fills its buffer mean depending on its"),
    "at random": (WAVES, "if not self.started: self.mean += float(np.random.rand())",
                  "fills its buffer mean with other values for the same input"),
    "an average by a flag": (WAVES, "self.mean.lerp_(x.mean(0), 0.1 if self.started else 1.0)",
                             "the first forward writes other values into mean than a later one"),
    "a parameter by a flag": (WAVES, "if not self.started: self.shift.data.copy_(-x.mean(0))",
                              "the first forward writes other values into shift than a later one"),
    "another output": (WAVES, "x += 0 if self.started else 1",
                       "the first forward gives another output than a later one of the same input: "
                       "the first module that does is the model itself (Model)"),
    "a parameter that is made": (WAVES,
                                 "if not self.started: self.made = nn.Parameter(torch.ones(8))",
                                 "the first forward makes its parameter made, so no two runs are"),
    "another shape, of what weights make": (
        WAVES, "self.mean = self.proj(x).mean(0)[None]",
        "each forward replaces its buffer mean by one of another shape"),
    "another shape": (WAVES, "self.mean = x.mean(0)[None]",
                      "each forward replaces its buffer mean by one of another shape"),
    "expanded": (WAVES, "self.mean = x[0, :1].expand(8)",
                 "by one of another shape, or by an expanded one"),
}  # fmt: skip
JUDGED = {
    "constants by a flag": ("if not self.started: self.mean.fill_(0.5)", ()),
    "an average": ("self.mean.lerp_(x.mean(0), 0.1)", ("model.mean",)),
    "overwritten each time": ("self.mean.copy_(x.mean(0))", ("model.mean",)),
    "a parameter each time": ("self.shift.data.copy_(-x.mean(0))", ()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_first_forward_does_alone_is_refused_with_the_reason(own: Own, name: str) -> None:
    given, does, why = REFUSED[name]
    text = own(MODEL.format(does, given))
    with pytest.raises(ValueError, match=r"^model mine\.py:build: ") as caught:
        register(text)
    assert why in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", JUDGED)
def test_what_each_forward_does_is_judged(own: Own, name: str) -> None:
    does, changing = JUDGED[name]
    text = own(MODEL.format(does, WAVES))
    assert register(text)[0].changing == changing
    found = judged(text, "torch.fp32", dtype="fp32", steps=2)
    assert found.ran and not found.causes, [(v.rule, v.symptom) for v in found.causes]


def test_a_parameter_whose_elements_share_memory_is_refused(own: Own) -> None:
    text = MODEL.replace("nn.Parameter(torch.zeros(8))", "nn.Parameter(torch.zeros(1).expand(8))")
    with pytest.raises(ValueError, match="elements of its parameter shift share memory"):
        register(own(text.format("pass", WAVES)))
