"""Why compiled models of transformers differ from eager: their mask, and nothing else. What
`make models` says of them is owned by that."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from narrowfuzz.environment import settle

pytest.importorskip("transformers", reason="make models installs it")
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14):
    pytest.skip("transformers leaves the mask out there", allow_module_level=True)
settle()


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent / "own_models"), *sys.path])
    return importlib.import_module("hf_transformers")


def gradients(model: Any, inputs: Any, run: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """The output and all gradients of one step on the same output gradient."""
    model.zero_grad()
    result = run(**inputs) if isinstance(inputs, dict) else run(inputs)
    output = getattr(result, "logits", result)
    drawn = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    output.backward(drawn.to(output.dtype))
    named = model.named_parameters()
    return {"output": output.detach(), **{n: p.grad for n, p in named if p.grad is not None}}


@pytest.mark.parametrize(
    ("name", "differs"),
    [("llama", True), ("qwen3", True), ("mixtral", True), ("qwen3_moe", True), ("gemma", True),
     ("gemma2", False), ("gemma3", True)],
)  # fmt: skip
def test_the_mask_is_all_that_differs(
    pages: Any, monkeypatch: pytest.MonkeyPatch, name: str, differs: bool
) -> None:
    from transformers import masking_utils

    def different(other: dict[str, torch.Tensor]) -> list[str]:
        return [key for key in compiled if not torch.equal(compiled[key], other[key])]

    model, inputs = getattr(pages, name)()
    torch._dynamo.reset()
    compiled = gradients(model, inputs, torch.compile(model, backend="aot_eager"))
    assert bool(different(gradients(model, inputs, model))) == differs
    monkeypatch.setattr(masking_utils, "_ignore_causal_mask_sdpa", lambda *_, **__: False)
    assert different(gradients(model, inputs, model)) == []
