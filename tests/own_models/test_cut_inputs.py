"""Models whose forward sets requires_grad of its input are called with one that needs none."""

from __future__ import annotations

import pytest
from narrowfuzz.arms.model_names import gradient_names
from narrowfuzz.case.trainings import not_reentrant
from narrowfuzz.own_models import register
from narrowfuzz.plants.registry import builtin_plants
from test_own_causes import ROWWISE, judged
from test_own_models import Own, case_of, own

__all__ = ["own"]  # a fixture

#: As transformers' Wav2Vec2FeatureEncoder does it, for reentrant checkpoints.
SPEECH = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)
    def forward(self, x):
        return x + self.down(self.up(x).relu())
class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(32, 32)
    def forward(self, x):
        x = x[:, None]
        if self.training:
            x.requires_grad = True
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
def build():
    return Speech(), torch.linspace(-2, 2, 16 * 32).view(16, 32)
"""
WAYS = {
    "once": {},
    "recomputed": {"checkpoint": "full"},
    "reentrant": {"checkpoint": "reentrant"},
    "compiled": {"compile": "aot_eager"},
    "twice": {"steps": 2, "microbatches": 2},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_sets_requires_grad_of_its_input_is_judged(own: Own, way: str) -> None:
    found = judged(own(SPEECH), "torch.fp32", dtype="fp32", **WAYS[way])
    assert found.ran and not found.causes, [(v.rule, v.symptom) for v in found.causes]


def test_faults_in_it_are_found_and_its_input_has_no_gradient(own: Own) -> None:
    text = own(SPEECH)
    (model,) = register(text)
    names = gradient_names(case_of(model).spec)
    assert model.cut and "grad_input" not in names and len(names) == 10
    assert model.regions and not not_reentrant(model.name, autocast=False)
    with builtin_plants()["bias-gradient-loses-row"].plant():
        assert judged(text, ROWWISE, dtype="fp32").causes


def test_other_models_get_an_input_with_a_gradient(own: Own) -> None:
    (model,) = register(own(SPEECH.replace("x.requires_grad = True", "x = x * 1")))
    assert not model.cut and "grad_input" in gradient_names(case_of(model).spec)
    raises = "if x.requires_grad: raise RuntimeError('another error')"
    text = own(SPEECH.replace("x = x[:, None]", raises), name="raises.py")
    with pytest.raises(ValueError, match="raised RuntimeError: another error"):
        register(text)
