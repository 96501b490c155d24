"""Why compiled models of transformers differ from eager: their mask or their scan, and nothing
else. What `make models` says of them is owned by that."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="make models installs it")
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14):
    pytest.skip("transformers leaves the mask out there", allow_module_level=True)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "own_models"), *sys.path])
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


@pytest.mark.parametrize("associative", [True, False])
def test_the_scan_is_all_that_differs_in_mamba(pages: Any, associative: bool) -> None:
    """Compiled, its scan is torch's associative one; in eager, a loop."""
    model, inputs = pages.mamba()
    model.config.use_associative_scan = associative
    for module in model.modules():
        if hasattr(module, "use_associative_scan"):
            module.use_associative_scan = associative
    differing = 0
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for seed in range(8):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.05)
        eager = gradients(model, inputs, model)
        again = gradients(model, inputs, compiled)
        differing += any(not torch.equal(eager[key], again[key]) for key in eager)
    assert bool(differing) == associative
