"""The short script of a user's own ``autograd.Function``: it builds and calls the user's model, and
checks the Function by itself. No data of a case goes into it."""

from __future__ import annotations

from narrowfuzz.arms.functions import ids_of
from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.play import derivatives, differences, functions, own, player
from narrowfuzz.trace.expect import DerivativeOf
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.script.parts import TORCH_NAME
from narrowfuzz.triage.script.paste import pasted
from narrowfuzz.triage.script.short import Short

_SOURCES = (player, own, functions, differences, derivatives)


def of_function(spec: Spec, verdict: Verdict, device: str) -> Short:
    """The script for a verdict about a Function, for a device by torch's name."""
    expect, model = verdict.expect, MODELS[spec.model]
    assert isinstance(expect, DerivativeOf)
    judged = f"wrong_backward(found, {expect.function!r}, {verdict.at.name!r})"
    return Short(
        verdict,
        model.title,
        "import torch\ntorch.set_num_threads(1)",
        (
            pasted((model.module, "derivatives", "wrong_backward"), _SOURCES),
            f"model = {model.expression(spec)}.to({device!r}, {TORCH_NAME[spec.dtype]})\n"
            f"found = derivatives(model, {ids_of(spec)})\nsentence, shows = {judged}\n"
            "print(sentence)\nsys.exit(125 if shows is None else int(shows))",
        ),
    )
