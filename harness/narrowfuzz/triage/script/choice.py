"""Chooses the script for a finding of a converted model in one process. The script, repro.py,
imports only torch and the library under test, and exits with 1 while the divergence is there and
with 0 once it is gone."""

from __future__ import annotations

from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Case
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.trace.expect import DerivativeOf
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.script.census import of_conversion
from narrowfuzz.triage.script.function import of_function
from narrowfuzz.triage.script.linear import is_plain, of_linear
from narrowfuzz.triage.script.model import of_model
from narrowfuzz.triage.script.parts import Tensors
from narrowfuzz.triage.script.played import write_played_script
from narrowfuzz.triage.script.short import write_short_script
from narrowfuzz.triage.script.short_check import check_text


def script_of(
    case: Case,
    verdict: Verdict,
    recipe: Recipe,
    tensors: Tensors | None = None,
    *,
    device: str = "cpu",
) -> str:
    """The simplest script for a finding of a converted model in one process, with these tensors or
    the case's own, for a device by torch's name. Raises ValueError for a finding that no script can
    show by itself."""
    tensors = tensors_of(case, recipe) if tensors is None else tensors
    if isinstance(verdict.expect, DerivativeOf):
        return write_short_script(of_function(case.spec, verdict, device))
    if verdict.at.what == "module":
        return write_short_script(of_conversion(case, verdict, recipe))
    plain = not case.history and is_plain(case.spec, verdict, BY_NAME[verdict.arm])
    if plain and (check := check_text(verdict)):
        return write_short_script(of_linear(case, verdict, recipe, tensors, check, device))
    return write_played_script(of_model(case, verdict, recipe, tensors, device=device))
