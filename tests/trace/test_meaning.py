"""What a divergence means: every symptom that a rule can write has words that a reader knows."""

from __future__ import annotations

import fnmatch
import json
import re
from pathlib import Path
from typing import get_args

import pytest
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.judge.judge import Judge
from narrowfuzz.judge.observe import tensors_of
from narrowfuzz.ledger.ledger import Ledger, load_entries
from narrowfuzz.plants.registry import planted
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.rules import BY_NAME, RULES
from narrowfuzz.rules.relations_shape import check_variants, variants
from narrowfuzz.rules.relations_state import telling
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Is, Present, Refuses, Runs, Same, Within, bits
from narrowfuzz.trace.meaning import broken, meaning, shortened, times
from narrowfuzz.trace.trace import ChangeKind
from narrowfuzz.trace.verdict import Verdict
from samples import recipes

SEEN = json.loads((Path(__file__).parents[1] / "fingerprints.json").read_text())
#: Words that only the code uses.
PRIVATE = ("granule", "rung", "oracle", "spec", "ledger", "arm ", "radius", "draw")


def test_every_symptom_that_faults_show_has_words_of_its_own() -> None:
    seen = {tuple(name.split("--")) for names in SEEN.values() for name in names}
    assert len(seen) > 100
    for _, role, _, symptom, *_ in sorted(seen):
        said = meaning(role, symptom, At(name=role, index=(0, 0)), None)
        assert said != symptom, symptom


def test_every_symptom_of_a_known_issue_has_words_of_its_own() -> None:
    globs = {glob for e in load_entries() for match in e.matches for glob in match.fingerprints}
    assert len(globs) > 60
    for glob in sorted(globs):
        _, role, _, symptom = glob.split("--")[:4]
        if symptom == "*" or symptom.startswith(("refus*", "fails only on ranks*")):
            continue  # one of several
        plain = symptom.replace("* (", "fails although nothing forbids it (")
        plain = plain.removesuffix("*").replace("*", "x")
        said = meaning(role, plain, At(name=role), None)
        assert said != plain, glob


@pytest.mark.parametrize("kind", get_args(ChangeKind))
def test_every_change_of_a_conversion_has_words(kind: str) -> None:
    said = meaning("convert", kind, At(what="module", name="proj"), None)
    assert said.startswith("conversion ")


def test_no_words_are_the_codes_own() -> None:
    import narrowfuzz.trace.meaning as told

    words = [*told._CONVERSION.values(), *told._RAISES.values(), *told._SYMPTOMS.values()]
    assert not [w for w in words for private in PRIVATE if private in re.sub(r"\{\w+\}", "", w)]
    assert not fnmatch.filter(words, "*nobody*")


def test_every_variant_of_a_case_says_what_was_done_to_it() -> None:
    spec = Spec(recipe="torch.fp32", dtype="fp32", m=64, k=64, n=64, batch=2, bias=True,
                input_layout="transposed")  # fmt: skip
    case = Case(spec=spec, data=DataSpec(seed=1))
    recipe = recipes()["torch.fp32"]
    assert isinstance(recipe, Recipe)
    tensors = tensors_of(case, recipe)
    names = {rule.name for rule in RULES if getattr(rule.check, "func", None) is check_variants}
    titles = {
        variant.run.name
        for name in names
        for variant in variants(name, case, recipe.plan(spec), tensors)
    }
    assert len(titles) >= 9
    for title in (*titles, "after steps", "after reload"):
        said = meaning("output", "result changes", At(name="output", run=title), None)
        assert "when it is run again" not in said, title


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        (
            Verdict(
                "O3", "eager", "output", "diverged", "scale byte -1",
                At(what="scale", name="output", side="a", index=(0, 2)), "byte 125",
                Is(bits(126), byte=True),
            ),
            "scale of the input (row 0, block 2) is one power of two too small: expected byte 126, "
            "got byte 125",
        ),
        (
            Verdict(
                "O5", "eager", "output", "diverged", "wrong value", At(name="output", index=(0, 0)),
                "0.4765625", Within(bits(1.5625), bits(1.5625)), factor=71512.3,
            ),
            "output is wrong at [0, 0]: expected 1.5625, got 0.4765625; the error is 71500 times "
            "the tolerance",
        ),
        (
            Verdict(
                "contract", "eager", "backward", "diverged", "no grad_parameter",
                At(name="head.weight.grad"), "None for head.weight.grad",
                Present(("head.weight.grad",)),
            ),
            "head.weight has no gradient after backward",
        ),
        (
            Verdict(
                "O13", "eager+checkpoint", "output", "diverged", "operands differ in recompute",
                At(what="source", layer="ffn.w2", name="input", phase="recompute", index=(0, 0)),
                "0.171", Same(At(what="source", layer="ffn.w2", name="input", phase="forward"),
                              "0.169"),
            ),
            "ffn.w2: the input differs when backward recomputes it at [0, 0]: expected 0.169 as "
            "in its forward, got 0.171",
        ),
        (
            Verdict(
                "R5", "eager", "output", "diverged", "result changes",
                At(name="output", index=(3, 1), run="permuted tokens"), "2",
                Same(At(name="output", index=(0, 1)), "1"),
            ),
            "output changes when the tokens are permuted at [3, 1]: expected 1 as without that "
            "change, got 2",
        ),
    ],
)  # fmt: skip
def test_a_finding_begins_with_what_it_means(verdict: Verdict, sentence: str) -> None:
    assert verdict.sentence() == sentence


@pytest.mark.parametrize(
    ("factor", "text"), [(1.25, "1.25"), (71512.3, "71500"), (350.0, "350"), (3e9, "3e+09")]
)
def test_a_multiple_is_a_number_that_can_be_read(factor: float, text: str) -> None:
    assert times(factor) == text


@pytest.mark.parametrize(("fault", "ignored"), [("bias-forgotten", True), ("gemm-gain", False)])
def test_a_bias_that_is_ignored_is_named_and_no_other_error_is_called_so(
    fault: str, ignored: bool
) -> None:
    spec = Spec(recipe="torchao.float8.rowwise", m=32, k=64, n=32, bias=True)
    judge = Judge(recipes(), Ledger([]))
    with planted("", fault):
        verdicts = judge.judge(Case(spec=spec, data=DataSpec(seed=1)), [BY_NAME["O5"]]).verdicts
    (bad,) = {v.sentence().partition(" at ")[0] for v in verdicts if v.status == "diverged"}
    assert ("the bias of this linear is ignored" in bad) == ignored
    assert {v.symptom for v in verdicts if v.status == "diverged"} == {"wrong value"}


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("in_features must be a multiple of 32, the MX block, got 1",
         "in_features=1 (must be a multiple of 32, the MX block)"),
        ("out_features of output must be a multiple of 128, got 2000 (its weight is 2000 x 256)",
         "out_features=2000 of output (must be a multiple of 128) (its weight is 2000 x 256)"),
        ("dtype must be bf16 for the native kernels, got fp16",
         "dtype must be bf16 for the native kernels, got fp16"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_not_said_as_if_the_library_had_to_print_it(rule: str, said: str) -> None:
    assert broken(rule) == said
    verdict = Verdict(
        "contract", "eager", "forward", "crashed", "refusal names no layer (AssertionError in to)",
        got="AssertionError: no", expect=Refuses(rule, "AssertionError", "layer"),
    )  # fmt: skip
    assert verdict.sentence() == (
        f"the error does not name the layer: {said}; got AssertionError: no"
    )


UNSAFE = """Weights only load failed. This file can still be loaded, to do so you have two \
options, \x1b[1mdo those steps only if you trust the source of the checkpoint\x1b[0m.
\t(1) In PyTorch 2.6, we changed the default value.
\t(2) Alternatively, please check the recommended steps in the following error message.
\tWeightsUnpickler error: Unsupported global: GLOBAL torchao.config.Op was not an allowed global \
by default. Please use `torch.serialization.add_safe_globals([Op])`."""


def test_a_load_that_is_refused_says_what_is_refused() -> None:
    said = "Unsupported global: GLOBAL torchao.config.Op was not an allowed global by default"
    assert telling(UNSAFE) == said
    assert telling("size mismatch\nfor weight") == "size mismatch"
    verdict = Verdict(
        "R20", "eager", "state", "diverged", "cannot be loaded (UnpicklingError)",
        got="UnpicklingError: Weights only", expect=Runs("UnpicklingError"),
        reported=f"it says {said}",
    )  # fmt: skip
    assert verdict.sentence() == f"torch.load refuses the saved state_dict: it says {said}"


def test_a_message_is_cut_at_the_end_of_a_word_and_keeps_what_fits() -> None:
    text = "The shape is wrong. Hint: pad it"
    for most in range(1, len(text) + 3):
        said = shortened(text, most)
        kept = said.removesuffix(" ...")
        assert text.startswith(text[:most].rstrip()) and kept.startswith(text[:most].rstrip())
        assert (said == text) == (len(kept) == len(text))
        assert kept == text or text[len(kept)] == " "
    assert shortened(text, 22) == "The shape is wrong. Hint: ..."
    assert len(shortened("x" * 5000, 200)) < 250


@pytest.mark.parametrize("frame", ["<listcomp>", "<genexpr>", "<dictcomp>", "<lambda>"])
def test_a_frame_without_a_name_of_its_own_is_not_named(frame: str) -> None:
    symptom = f"fails although nothing forbids it (TypeError in {frame})"
    said = meaning("forward", symptom, At(), None)
    assert said.endswith("promises to run it, with TypeError")
    said = meaning("forward", f"TypeError in quantization.{frame}", At(), None)
    assert said.endswith("fails with TypeError in quantization")
    named = meaning("forward", "fails only under compile (TypeError in cast)", At(), None)
    assert named.endswith("with TypeError in cast")


def test_a_gradient_that_was_placed_at_a_module_is_the_modules_output() -> None:
    """It is not the gradient's numbers that are then shown."""
    there = At(layer="model.router", name="output", index=(0, 0))
    said = meaning("grad_input", "differs from no checkpoint", there, None)
    assert said == "output differs with checkpointing"
    whole = At(name="grad_input", index=(0, 0))
    said = meaning("grad_input", "differs from no checkpoint", whole, None)
    assert said == "input gradient differs with checkpointing"
