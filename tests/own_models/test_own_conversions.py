"""What a conversion does to a user's own model: what it alone raises or loses, and what it may."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from narrowfuzz.case.spec import DataSpec, Spike
from narrowfuzz.judge.judge import Judge
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.own_models import register
from narrowfuzz.plants.registry import builtin_plants
from narrowfuzz.report.judged import judged_layers
from narrowfuzz.rules.kernels import check_weight_copies
from narrowfuzz.trace.expect import Present
from narrowfuzz.trace.trace import Seen
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.triage import triage
from narrowfuzz.triage.verify import RunScript
from samples import of_operators
from test_own_causes import MX, PARTS, ROWWISE, TENSORWISE, causes, entries, judged, one
from test_own_models import RECIPES, Own, case_of, own

__all__ = ["own"]  # a fixture

PAIRS = """
class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(32, 32), nn.Linear(32, 32)
        self.score = nn.Bilinear(32, 32, 16)
    def forward(self, x):
        return self.score(self.left(x), self.right(x))
def build():
    return Pairs(), torch.zeros(16, 32)
"""


@pytest.mark.parametrize("recipe", ["torch.fp32", ROWWISE])
def test_a_model_that_autocast_does_not_run_is_no_librarys(own: Own, recipe: str) -> None:
    """nn.Bilinear is on no list of autocast on a CPU: it gets bf16 and its own fp32."""
    judgement = judged(own(PAIRS), recipe, autocast=True)
    assert not judgement.causes
    (said,) = {v.why for v in judgement.verdicts if v.rule == "contract"}
    assert said.startswith("the model itself, unconverted, raises RuntimeError: All tensors must")
    assert not judged(own(PAIRS), recipe).causes


#: It refuses what is not finite, and quotes its numbers, which a conversion rounds.
REFUSES = """
class Refuses(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Linear(32, 32)
    def forward(self, x):
        logits = {called}
        if logits.isfinite().all():
            return logits
        alike = (logits == logits[:1]).all(-1).sum()
        raise ValueError(f"loss {{logits.flatten()[0].item()}} of {rows} rows\\n{{logits}}")
def build():
    return Refuses(), torch.zeros(16, 32)
"""


def refusing(own: Own, called: str, rows: str, bits: str) -> list[Verdict]:
    """The verdicts on its errors, with these bits in one element of the input."""
    case = case_of(register(own(REFUSES.format(called=called, rows=rows)))[0], TENSORWISE)
    spikes = (Spike(tensor="input", row=3, col=5, bits=bits),) if bits else ()
    case = msgspec.structs.replace(case, data=DataSpec(spikes=spikes))
    verdicts = Judge(RECIPES, of_operators()).judge(case).verdicts
    return [v for v in verdicts if v.rule == "contract" and v.arm == "eager"]


@pytest.mark.parametrize(("rows", "found"), [("16", False), ("{alike}", True)])
def test_a_model_that_refuses_an_overflow_is_no_librarys(own: Own, rows: str, found: bool) -> None:
    """Converted, all rows but the one with a number near the largest become zero before the
    bias."""
    (verdict,) = refusing(own, "self.actor(x) * 8.0", rows, "0x7f61b1e6")
    assert (verdict.status == "crashed") is found
    assert ("the model itself, unconverted, raises ValueError: loss" in verdict.why) is not found


def test_a_model_that_refuses_what_a_conversion_spreads_is_no_librarys(
    own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensorwise, one infinity makes all NaN; else its tanh is 1."""
    from torchao.float8.float8_linear import Float8Linear

    (verdict,) = refusing(own, "torch.tanh(self.actor(x))", "16", "0x7f800000")
    assert verdict.why == "the model itself refuses numbers that are not finite, which the case has"
    forward = Float8Linear.forward
    monkeypatch.setattr(Float8Linear, "forward", lambda self, x: forward(self, x) * float("nan"))
    (verdict,) = refusing(own, "torch.tanh(self.actor(x))", "16", "")
    assert verdict.status == "crashed", "there is nothing infinite"


#: It differentiates its output by its input, and what comes of that by its weights.
TWICE = """
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            u = self.second(torch.tanh(self.first(x)))
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (slope[:, :16] + u[:, :16]).square()
def build():
    return Twice(), torch.zeros(32, 32)
"""


@pytest.mark.parametrize("recipe", [TENSORWISE, ROWWISE, MX])
def test_what_a_library_says_of_second_derivatives_is_its_own(own: Own, recipe: str) -> None:
    """Not what a tap in front of its products would say, which no script reproduces."""
    found = [v for v in judged(own(TWICE), recipe).verdicts if v.status == "crashed"]
    assert all("torchao" in verdict.at.name for verdict in found), found
    assert not any("_data" in verdict.got for verdict in found)


@pytest.mark.parametrize("autocast", [False, True])
def test_what_a_converted_model_alone_raises_is_found(
    own: Own, monkeypatch: pytest.MonkeyPatch, autocast: bool
) -> None:
    from torchao.float8.float8_linear import Float8Linear

    def raises(self: Float8Linear, x: object) -> object:
        raise RuntimeError("a converted linear does not run")

    monkeypatch.setattr(Float8Linear, "forward", raises)
    verdict = one(judged(own(PAIRS), ROWWISE, autocast=autocast), "contract")
    assert "a converted linear does not run" in verdict.got


def test_a_gradient_that_conversion_alone_loses_is_found(
    own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    from torchao.float8.float8_linear import Float8Linear

    forward = Float8Linear.forward

    def without(self: Float8Linear, x: object) -> object:
        kept, self.weight.requires_grad = self.weight.requires_grad, False
        try:
            return forward(self, x)
        finally:
            self.weight.requires_grad = kept

    text = own(PARTS + "def build(): return rows(MLP())\n")
    monkeypatch.setattr(Float8Linear, "forward", without)
    verdict = one(judged(text, ROWWISE), "contract")
    assert verdict.expect == Present(("model.down.weight.grad", "model.up.weight.grad"))


#: It calls its second linear only if a condition holds.
CHOOSES = """
class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
    def forward(self, x):
        y = self.first(x)
        return self.second(y) if {condition} else y
def build():
    return Chooses(), torch.zeros(16, 32)
"""


@pytest.mark.parametrize(
    ("condition", "found"),
    [("y[0].isfinite().all()", False), ("type(self.second) is nn.Linear", True)],
)
def test_a_linear_that_the_values_skip_needs_no_gradient_and_one_that_conversion_hides_does(
    own: Own, condition: str, found: bool
) -> None:
    """Tensorwise, an infinity in row 3 makes row 0 NaN, too."""
    case = case_of(register(own(CHOOSES.format(condition=condition)))[0], TENSORWISE)
    spike = Spike(tensor="input", row=3, col=5, bits="0x7f800000")
    case = msgspec.structs.replace(case, data=DataSpec(spikes=(spike,)))
    judgement = Judge(RECIPES, of_operators()).judge(case)
    lost = Present(("model.second.bias.grad", "model.second.weight.grad"))
    assert [v.expect for v in judgement.causes] == [lost] * found


# What is known is known in anybody's model.

HOOKED = """
class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.one.is_initialized = self.two.is_initialized = True
        self.one.weight.is_initialized = self.two.weight.is_initialized = True
    def forward(self, x):
        return self.two(F.gelu(self.one(x)))
def build():
    model = Mine()
"""
LOSES = {
    "hooks lost": "model.one.register_forward_hook(lambda m, a, y: y * 2)",
    "own forward lost": "model.one = type('Own', (nn.Linear,), {'forward': lambda m, x: x})(D, D)",
}


@pytest.mark.parametrize("symptom", LOSES)
def test_what_the_swap_of_a_linear_loses_is_known(own: Own, symptom: str) -> None:
    text = own(PARTS + HOOKED + f"    {LOSES[symptom]}\n    return rows(model)\n")
    assert causes(judged(text, ROWWISE)) == [("census", symptom)]
    known = judged(text, ROWWISE, known=True)
    assert not known.causes and {v.symptom for v in known.known} == {symptom}


#: What calls a linear that has its own forward, or attributes of its weight, fails without them.
CALLS = """
class Router(nn.Linear):
    def forward(self, x):
        return super().forward(x), self.kind
class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x / self.weight.fan)
class Shaped(nn.Linear):
    '''It fails inside of torch.'''
    def forward(self, x):
        fan = getattr(self.weight, "fan", 31.0)
        return super().forward(x + torch.ones(32 if fan == 8.0 else 31))
class Calls(nn.Module):
    def __init__(self, width, last):
        super().__init__()
        self.first = nn.Linear(32, 32, bias=False)
        self.last = last(32, width, bias=False)
        self.last.weight.fan, self.last.kind = 8.0, "router"
    def forward(self, x):
        return self.called(self.last(self.first(x)))
    def called(self, y):
        return y
class Unpacks(Calls):
    def called(self, y):
        y, kind = y
        return y
class Writes(Unpacks):
    def called(self, y):
        return self.first(super().called(y)).add_(1.0)
class WritesAlone(Calls):
    def called(self, y):
        return y.add_(1.0)
class Same(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1.0
class Asks(Calls):
    '''It wants exactly nn.Linear, whatever the layer returns.'''
    def called(self, y):
        if type(self.first) is not nn.Linear:
            raise TypeError("it wants an nn.Linear")
        return y[0]
def build():
    return {model}({width}, {last}), torch.zeros(32, 32)
"""
OWN_FORWARD = "float8-swap-drops-own-forward"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("recipe", "model", "last", "width", "entry"),
    [
        (ROWWISE, "Unpacks", "Router", 32, OWN_FORWARD),
        (TENSORWISE, "Unpacks", "Router", 32, OWN_FORWARD),
        (ROWWISE, "Asks", "Router", 32, ""),
        (MX, "Calls", "Scaled", 32, "mx-wrapper-unties-weights"),
        (MX, "Calls", "Scaled", 16, None),
        (MX, "Calls", "Shaped", 16, None),
    ],
)
def test_a_model_that_fails_for_what_its_linears_lost_is_known(
    own: Own, recipe: str, model: str, last: str, width: int, entry: str | None
) -> None:
    """entry: what explains the failure; "": it has another reason. None: the size is illegal, but
    the model fails before the library refuses that, so nothing is said of the refusal."""
    text = own(CALLS.format(model=model, last=last, width=width))
    backend = "wrapper" if recipe == MX else ""
    judgement = judged(text, recipe, known=True, backend=backend)
    found = [v for v in judgement.verdicts if v.rule == "contract" and v.arm == "eager"]
    if entry is None:
        (verdict,) = found
        assert verdict.status == "not_applicable" and verdict.why.startswith(
            "after the conversion, which dropped something, the model's own code raises before the"
        )
    elif entry:
        (verdict,) = (v for v in judgement.known if v.rule == "contract")
        assert not judgement.causes and verdict.explained_by == entry
    else:
        (verdict,) = (v for v in judgement.causes if v.rule == "contract")
        assert "it wants an nn.Linear" in verdict.got


def test_an_error_inside_of_a_converted_subclass_is_not_known(
    own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left unconverted the layer would not raise it either, whatever the reason."""
    from torchao.float8 import float8_linear

    source = (
        "def fails(layer, x):\n"
        "    if layer.out_features == 48:\n"
        "        raise RuntimeError('a stale descriptor')\n"
        "    return usual(layer, x)\n"
    )
    names: dict[str, Any] = {"usual": float8_linear.Float8Linear.forward}
    exec(compile(source, float8_linear.__file__, "exec"), names)  # a function of torchao's
    monkeypatch.setattr(float8_linear.Float8Linear, "forward", names["fails"])
    text = own(CALLS.format(model="Calls", last="Same", width=48))
    (verdict,) = (v for v in judged(text, ROWWISE, known=True).causes if v.rule == "contract")
    assert "a stale descriptor" in verdict.got


def test_a_second_known_failure_does_not_hide_the_first(own: Own) -> None:
    """Without the first the model fails on the next: an output of a linear written in place."""
    text = own(CALLS.format(model="Writes", last="Router", width=32))
    judgement = judged(text, ROWWISE, known=True)
    (verdict,) = (v for v in judgement.known if v.rule == "contract")
    assert not judgement.causes and verdict.explained_by == OWN_FORWARD


def test_a_failure_that_any_converted_linear_shows_is_not_that_of_subclasses(own: Own) -> None:
    """Left unconverted the subclass would not show it either. What it lost is known, too."""
    text = own(CALLS.format(model="WritesAlone", last="Same", width=32))
    judgement = judged(text, ROWWISE, known=True)
    explained = {v.rule: v.explained_by for v in judgement.known}
    assert not judgement.causes
    assert explained == {"contract": "linear-output-in-place", "census": OWN_FORWARD}


def test_what_a_conversion_loses_elsewhere_is_not_known(
    own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Beside linears that are swapped, and lose theirs as it is known."""
    import torchao.float8

    convert = torchao.float8.convert_to_float8_training

    def drops(model, **how):  # type: ignore[no-untyped-def]
        model.model.norm._forward_hooks.clear()
        return convert(model, **how)

    text = own(PARTS + HOOKED + """
    model.norm = nn.LayerNorm(D)
    for part in model.children():
        part.register_forward_hook(lambda m, a, y: y * 2)
    return rows(model)
""")  # fmt: skip
    assert not judged(text, ROWWISE, known=True).causes
    monkeypatch.setattr(torchao.float8, "convert_to_float8_training", drops)
    (verdict,) = judged(text, ROWWISE, known=True).causes
    assert (verdict.symptom, verdict.at.name) == ("hooks lost", "model.norm")


@pytest.mark.parametrize(("recipe", "backend"), [(ROWWISE, ""), (MX, "wrapper")])
def test_an_attribute_that_nobody_reads_is_no_finding(own: Own, recipe: str, backend: str) -> None:
    judgement = judged(own(PARTS + HOOKED + "    return rows(model)\n"), recipe, backend=backend)
    assert not judgement.causes
    (census,) = (v for v in judgement.verdicts if v.rule == "census")
    assert census.status == "ok" and census.why


@pytest.mark.parametrize(
    ("recipe", "backend", "reads", "symptom"),
    [
        (ROWWISE, "", "getattr(self.two, 'is_initialized', False)", "attributes lost"),
        (MX, "wrapper", "getattr(self.two.weight, 'is_initialized', False)",
         "parameter attributes lost"),
    ],
)  # fmt: skip
def test_an_attribute_that_the_forward_reads_is_one(
    own: Own, recipe: str, backend: str, reads: str, symptom: str, scripts: RunScript
) -> None:  # fmt: skip
    source = HOOKED.replace(
        "self.two(F.gelu(self.one(x)))", f"self.two(self.one(x) * (1 + {reads}))"
    )
    text = own(PARTS + source + "    return rows(model)\n")
    verdict = one(judged(text, recipe, backend=backend), "census")
    assert verdict.symptom == symptom and verdict.at.name == "model.two"
    known = judged(text, recipe, backend=backend, known=True)
    assert not known.causes and verdict.symptom in {v.symptom for v in known.known}
    case = case_of(register(text)[0], recipe, backend=backend)
    assert triage(
        Judge(RECIPES, of_operators()), case, verdict, seconds=2.0, scripts=scripts
    ).confirmed


def test_a_bias_that_the_wrapper_drops_is_known_and_that_of_a_norm_is_not(own: Own) -> None:
    text = own(
        PARTS + "def build(): return rows(nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D)))\n"
    )
    found = judged(text, MX, backend="wrapper", known=True)
    assert not found.causes and entries(found) == {"mx-wrapper-drops-bias"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm", "parametrizations.weight_norm"])
@pytest.mark.parametrize(("recipe", "backend"), [(ROWWISE, ""), (MX, "wrapper")])
def test_a_weight_that_is_computed_is_known_not_to_be_converted(
    own: Own, norm: str, bias: bool, recipe: str, backend: str
) -> None:
    """By a parametrization, or by a hook before each forward."""
    text = own(
        f"{PARTS}def build():\n"
        f"    normed = nn.utils.{norm}(nn.Linear(D, D, bias={bias}))\n"
        "    return rows(nn.Sequential(normed, nn.Linear(D, D, bias=False)))\n"
    )
    assert register(text)[0].computed_weights == ("model.0",)
    found = judged(text, recipe, backend=backend, known=True)
    assert not found.causes and entries(found) == {"parametrized-linears"}


@pytest.mark.parametrize("plain", [0, 1])
def test_a_plain_linear_beside_a_computed_weight_is_not_known_to_be_left_unconverted(
    own: Own, plain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchao.quantization

    convert = torchao.quantization.quantize_

    def leaves_one(model: Any, config: Any, filter_fn: Any) -> Any:
        chosen = lambda part, name: filter_fn(part, name) and str(plain) not in name  # noqa: E731
        return convert(model, config, chosen)

    text = own(PARTS + f"""
def build():
    both = [nn.Linear(D, D), nn.utils.weight_norm(nn.Linear(D, D, bias=False))]
    return rows(nn.Sequential(both[{plain}], both[{1 - plain}]))
""")  # fmt: skip
    monkeypatch.setattr(torchao.quantization, "quantize_", leaves_one)
    verdict = one(judged(text, MX, backend="wrapper", known=True), "census")
    assert (verdict.symptom, verdict.at.name) == ("left unconverted", f"model.{plain}")


#: As the heads of BERT-like models, which hold the bias of their last linear, too.
HEAD = """
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(D))
        self.decoder = nn.Linear(D, D)
        {tie}
    def forward(self, x):
        return self.decoder(x) {plus}
def build(): return rows(Head())
"""
TIE = "self.decoder.bias = self.bias"


@pytest.mark.parametrize(
    ("tie", "plus"), [(TIE, ""), (TIE, "+ self.bias"), ("pass", "+ self.bias")]
)
def test_a_dropped_bias_is_known_by_the_name_that_another_module_gives_it(
    own: Own, tie: str, plus: str
) -> None:
    """Where the model also adds it, it has a gradient, and nothing is missing."""
    text = own(PARTS + HEAD.format(tie=tie, plus=plus))
    tied = {"model.decoder.bias": "model.bias"} if tie == TIE else {}
    assert MODELS[register(text)[0].name].tied_biases == tied
    found = judged(text, MX, backend="wrapper", known=True)
    unties = {"mx-wrapper-unties-weights"} if tied else set()
    assert not found.causes and entries(found) == {"mx-wrapper-drops-bias", *unties}


# What a compiled graph multiplies by.

WEIGHT_ALONE = """
class Reads(nn.Module):
    "Multiplies by a linear's weight and by a piece of another, without calling either."
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, H, batch_first=True)
        self.norm, self.after = nn.LayerNorm(D), nn.Linear(D, D)
    def forward(self, x):
        h = self.norm(x)
        return x + self.after(self.attention(h[:, :8], h, h)[0].sum(1, keepdim=True))
def build(): return rows(Reads())
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recipe", [ROWWISE, TENSORWISE])
def test_a_weight_that_is_read_and_not_called_is_not_quantised_in_a_graph_either(
    own: Own, recipe: str
) -> None:
    judgement = judged(own(PARTS + WEIGHT_ALONE), recipe, known=True, compile="aot_eager")
    assert not causes(judgement)
    statuses = {v.status for v in judgement.verdicts if (v.rule, v.arm) == ("O2", "aot_eager")}
    assert "ok" in statuses  # that of the linear that is called is judged


@pytest.mark.parametrize("how", ["codes", "values"])
def test_a_copy_of_a_weight_that_is_lost_in_a_graph_is_wrong_if_it_has_codes(
    own: Own, how: str
) -> None:
    """Codes are a converted linear's; plain values may be any other matrix."""
    judge = Judge(RECIPES, of_operators())
    case = case_of(register(own(PARTS + WEIGHT_ALONE))[0], ROWWISE, compile="aot_eager")
    evidence = judge.observe(case, frozenset({"eager", "aot_eager"}))
    trace = evidence.traces["aot_eager"]
    lost = [
        replace(one, b=_lost(one.b, how)) for one in trace.multiplied if one.b.codes is not None
    ]
    assert lost
    traces = {**evidence.traces, "aot_eager": replace(trace, multiplied=tuple(lost))}
    statuses = {v.status for v in check_weight_copies(replace(evidence, traces=traces))}
    assert ("diverged" in statuses) is (how == "codes"), statuses


def _lost(seen: Seen, how: str) -> Seen:
    """No value of it is left."""
    assert seen.codes is not None
    if how == "codes":
        return replace(seen, codes=np.zeros_like(seen.codes))
    return replace(seen, codes=None, scale=None, values=np.zeros(seen.codes.shape, np.float32))


#: torchao makes two modules of each linear, and only those of the second names are called.
TWICE = """
class Block(nn.Module):
    def __init__(self, up):
        super().__init__()
        self.up = up
    def forward(self, x):
        return x + self.up(x).relu()
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        shared = [nn.Linear(32, 32) for _ in range(2)]
        self.all = nn.ModuleList(shared)
        self.layers = nn.ModuleList(map(Block, shared))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
def build():
    return Twice(), torch.linspace(-2, 2, 16 * 32).view(16, 32)
"""


@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_a_linear_that_a_conversion_makes_two_of_is_judged(own: Own, checkpoint: str) -> None:
    text = own(TWICE)
    (model,) = register(text)
    assert model.linears == ("model.all.0", "model.all.1")
    found = judged(text, ROWWISE, dtype="fp32", checkpoint=checkpoint, known=True)
    assert not found.causes and "float8-linear-registered-twice" in entries(found)
    seen = {(arm, layer) for _, _, arm, _, layer in
            judged_layers(found.verdicts, ROWWISE, model.name)}  # fmt: skip
    recomputed = ["eager+checkpoint"] * (checkpoint == "full")
    assert seen >= {(arm, layer) for arm in ("eager", *recomputed) for layer in model.linears}
    with builtin_plants()["cast-truncates"].plant():
        wrong = judged(text, ROWWISE, dtype="fp32", checkpoint=checkpoint, known=True)
    assert {verdict.at.layer for verdict in wrong.causes} & {f"model.layers.{i}.up" for i in (0, 1)}


def test_a_second_name_that_is_left_unconverted_is_no_quantised_linear(own: Own) -> None:
    both = "self.first = self.second = nn.Linear(32, 32)"
    text = own(TWICE.replace("self.layers =", both + "\n        self.layers =")
               .replace("return x\n", "return self.second(x)\n"))  # fmt: skip
    found = judged(text, ROWWISE, dtype="fp32", known=True)
    assert not found.causes and "float8-linear-registered-twice" in entries(found)
