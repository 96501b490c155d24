"""A user's own model is judged: right ones are silent, bugs are found, made smaller and shown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from narrowfuzz.arms.model_names import layer_names
from narrowfuzz.case.events import Backward, Forward, Reload, Step
from narrowfuzz.case.spec import dump_case, load_case
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.ledger.ledger import Ledger
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.own_models import known_as, register
from narrowfuzz.play.own import imported
from narrowfuzz.report.judged import judged_layers
from narrowfuzz.rules import RULES
from narrowfuzz.trace.verdict import fingerprint
from narrowfuzz.triage.minimise import minimise
from narrowfuzz.triage.triage import triage
from narrowfuzz.triage.verify import RunScript
from test_own_models import (
    ANOTHER_IN_RECOMPUTE,
    BLOCK,
    EXAMPLES,
    RECIPES,
    SIZES,
    Own,
    case_of,
    eager,
    own,
)

__all__ = ["own"]  # a fixture


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("vocabulary", "heads", "width"), [(512, 2, 160), (32000, 2, 24), (262144, 1, 10)]
)
def test_vocabularies_and_widths_of_real_models_are_judged_as_they_are(
    own: Own, vocabulary: int, heads: int, width: int
) -> None:
    """Head sizes of 80, 12 and 10, and 32k to 256k ids."""
    text = f"""{BLOCK}
def build():
    lm = llama.Llama({vocabulary}, {width}, 20, {heads}, 1)
    return lm.to(torch.bfloat16), torch.randint({vocabulary}, (1, 2))
"""
    (model,) = register(own(text))
    assert (model.fixed["n"], model.fixed["k"]) == (vocabulary, vocabulary)
    case = case_of(model)
    assert load_case(dump_case(case)) == case
    rules = [rule for rule in RULES if not rule.reruns]
    judgement = eager().judge(case, rules)
    assert judgement.ran and not judgement.causes
    assert tensors_of(case, RECIPES["torch.bf16"])["input"].max() > 0.5 * vocabulary


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("file", "build", "recipe"),
    [
        ("llama.py", "block", "torchao.float8.rowwise"),
        ("llama.py", "whole", "torchao.mxfp8.rceil"),
        ("others.py", "lora", "torchao.float8.tensorwise"),
        ("others.py", "pictures", "torch.fp32"),
    ],
)
def test_the_examples_are_sound_and_each_linear_is_judged(
    own: Own, file: str, build: str, recipe: str
) -> None:
    (model,) = register(f"{EXAMPLES / file}:{build}")
    case = case_of(model, recipe, checkpoint="selective", steps=2)
    judgement = Judge(RECIPES, Ledger([])).judge(case)
    assert not judgement.causes
    seen = {layer for _, _, arm, _, layer in judged_layers(judgement.verdicts, recipe, model.name)
            if arm == "eager"}  # fmt: skip
    assert seen >= set(model.linears) == set(layer_names(case.spec))


KEPT_CAST = (
    BLOCK
    + """
class CastOnce(nn.Linear):
    cast = None
    def forward(self, x):
        if self.cast is None:
            self.cast = self.weight.to(torch.bfloat16)
        return F.linear(x.to(torch.bfloat16), self.cast).to(x.dtype)
def build():
    block = llama.Block(64, 128, 2)
    block.feed_forward.w2 = CastOnce(128, 64, bias=False)
    return block, torch.zeros(2, 16, 64)
"""
)


def test_another_number_in_a_recompute_is_found_at_its_layer_with_a_script(
    own: Own, scripts: RunScript
) -> None:
    (model,) = register(own(ANOTHER_IN_RECOMPUTE))
    judge = Judge(RECIPES, Ledger([]))
    case = case_of(model, checkpoint="full")
    found = {(v.rule, v.at.layer): v for v in judge.judge(case).causes}
    verdict = found["O13", "model.feed_forward"]  # its own forward does it, none of its linears
    result = triage(judge, case, verdict, seconds=4.0, scripts=scripts)
    assert result.confirmed, result.finding.why_suspected
    assert result.finding.minimal.spec.model == model.name, "there is no smaller model of a user's"
    assert result.finding.sentence.startswith("model.feed_forward: ")


def test_a_script_repeats_on_one_model_as_the_judge_does(own: Own, scripts: RunScript) -> None:
    """What a model keeps begins anew with another one: that would show nothing."""
    (model,) = register(own("""
class Tires(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.calls = nn.Linear(8, 8), 0
    def forward(self, x):
        self.calls += 1
        return self.proj(x) * (1.0 if self.calls < 9 else 0.5)
def build(): return Tires(), torch.ones(4, 8)
"""))  # fmt: skip
    judge = eager()
    case = case_of(model, "torch.fp32", dtype="fp32", steps=5)
    (verdict,) = (v for v in judge.judge(case).causes if v.rule == "O1")
    result = triage(judge, case, verdict, seconds=1.0, scripts=scripts)
    assert result.confirmed, result.finding.why_suspected


def test_a_cast_kept_over_a_step_is_found(own: Own) -> None:
    (model,) = register(own(KEPT_CAST))
    events = (Forward(), Backward(of=(0,)), Step(), Reload(), Forward(), Backward(of=(1,)), Step())
    case = case_of(model, "torch.fp32", dtype="fp32", events=events)
    causes = eager().judge(case).causes
    assert any(v.symptom == "changed by a reload" for v in causes), causes


def test_what_runs_while_a_model_is_built_for_a_reload_is_no_call_of_it(own: Own) -> None:
    text = """
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, scale = nn.Linear(8, 8), F.softplus(10.0 ** torch.linspace(0, 1, 8))
        self.register_buffer("scale", F.rms_norm(torch.softmax(scale, 0), (8,), eps=1e-6))
    def forward(self, x):
        return torch.tanh(self.proj(x) * self.scale)
def build(): return Scaled(), torch.ones(4, 8)
"""
    (model,) = register(own(text))
    events = (Forward(), Backward(of=(0,)), Step(), Reload(), Forward(), Backward(of=(1,)), Step())
    case = case_of(model, "torch.fp32", dtype="fp32", events=events)
    trace = eager().observe(case).traces["eager"]
    assert trace.error is None and not trace.unjudged
    called = {call.operator for call in trace.operators}
    assert "tanh" in called and not called & {"softmax", "rms_norm", "pow"}


def test_a_case_makes_no_file_run_and_names_it(own: Own, tmp_path: Path) -> None:
    text = own("print('it runs')\ndef build(): return nn.Linear(8, 8), torch.ones(4, 8)")
    case = case_of(register(text)[0], "torch.fp32", dtype="fp32")
    raw = dump_case(case)
    del MODELS[case.spec.model]
    assert load_case(raw) == case and b"mine.py:build#" in raw and str(tmp_path).encode() not in raw
    with pytest.raises(ValueError, match=r"'mine.py:build' is a user's model: name its file by"):
        Judge(RECIPES, Ledger([])).judge(case)


def test_a_file_that_has_changed_is_judged_as_it_is_now(own: Own) -> None:
    text = own("def build(): return nn.Linear(8, 8), torch.ones(4, 8)")
    old = register(text)[0].name
    del MODELS[old]
    register.cache_clear()
    imported.cache_clear()
    own("def build(): return nn.Linear(8, 16), torch.ones(4, 8)")
    now = known_as(old, text)
    assert MODELS[old] is now and now.name != old and now.fixed["n"] == 16
    with pytest.raises(ValueError, match="the case is about the model other"):
        known_as("other.py:build#00000000", text)


def test_parameters_with_values_make_models_of_their_own(own: Own) -> None:
    default, *others = register(own(SIZES))
    assert default.by_default and default.name.startswith("mine.py:build#")
    names = [model.name.partition("#")[0].partition("(")[2] for model in others]
    assert names[:4] == ["width=8)", "width=24)", "width=32)", "layers=2)"] and len(names) == 7
    assert "layers=2, width=8)" in names and not any(m.by_default for m in others)
    by_name = {model.name: model for model in (default, *others)}
    assert {m.title for m in by_name.values()} == {"mine.py:build"}
    (wide,) = (m for m in others if "(width=32)" in m.name)
    assert wide.fixed["k"] == 32 and len(wide.linears) == 1
    assert by_name[wide.smaller[0]].fixed["k"] == 8
    assert default.name in wide.smaller and wide.name not in default.smaller


def test_a_finding_of_another_size_is_made_smaller_and_is_the_same_cause(own: Own) -> None:
    text = (
        SIZES.replace("nn.Sequential(*parts)", "Odd(*parts)")
        + """
class Odd(nn.Sequential):
    def forward(self, x):
        recomputed = torch._C._current_autograd_node() is not None
        return super().forward(x * (1 + 2.0**-6 * recomputed))
"""
    )
    models = register(own(text))
    judge = Judge(RECIPES, Ledger([]), frozenset({"eager", "eager+checkpoint"}))
    cases = [
        case_of(model, "torch.fp32", dtype="fp32", checkpoint="full")
        for model in (models[0], models[3])
    ]
    causes = [judge.judge(case).causes[0] for case in cases]
    wanted, other = (
        fingerprint(cause, judge.family(case.spec))
        for cause, case in zip(causes, cases, strict=True)
    )
    assert wanted == other
    small = minimise(cases[1], lambda c: judge.judge(c).cause(wanted) is not None).case
    assert small.spec.k == 8 and "width=8" in small.spec.model


def test_the_twin_is_the_model_in_float64(own: Own) -> None:
    from narrowfuzz.arms.twin import twin_outputs

    (model,) = register(own("def build(): return nn.Linear(8, 4), torch.ones(6, 8)"))
    case = case_of(model, "torch.fp32", dtype="fp32")
    tensors = tensors_of(case, RECIPES["torch.fp32"])
    x, weight, bias = (
        tensors[n].astype(np.float64) for n in ("input", "model.weight", "model.bias")
    )
    assert np.allclose(twin_outputs(case.spec, tensors)["output"], x @ weight.T + bias, rtol=1e-14)
