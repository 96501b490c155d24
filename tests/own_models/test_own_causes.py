"""What is said of a user's own model is true of it: models as people write them in plain torch, and
beside them the bugs that look like them."""

# ruff: noqa: F811

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from narrowfuzz.arms.model_names import gradient_names, ties
from narrowfuzz.case.events import Backward, Forward, Step
from narrowfuzz.judge.fold import Judgement
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import load_ledger
from narrowfuzz.ledger.severity import LARGE
from narrowfuzz.own_models import register
from narrowfuzz.rules.kernels import check_weight_copies
from narrowfuzz.trace.expect import Present
from narrowfuzz.trace.trace import Seen
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.effect import effect_of, observed
from narrowfuzz.triage.triage import triage
from narrowfuzz.triage.verify import RunScript
from samples import of_operators
from test_own_models import HEAD, RECIPES, Own, case_of, own  # noqa: F401

ROWWISE, TENSORWISE, MX = (
    "torchao.float8.rowwise",
    "torchao.float8.tensorwise",
    "torchao.mxfp8.rceil",
)

PARTS = """
D, H, V, S = 32, 2, 32, 16

class Attention(nn.Module):
    def __init__(self, mask=None, kv=H, by_flag=False):
        super().__init__()
        self.q, self.o = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.k, self.v = (nn.Linear(D, kv * D // H, bias=False) for _ in range(2))
        self.mask, self.by_flag = mask, by_flag
    def forward(self, x):
        q, k, v = (self.split(w(x)) for w in (self.q, self.k, self.v))
        if not self.by_flag:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        mask = None if self.mask is None else self.mask(q)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                           enable_gqa=self.by_flag)
        return self.o(y.transpose(1, 2).flatten(-2))
    def split(self, t):
        return t.unflatten(-1, (-1, D // H)).transpose(1, 2)

class MLP(nn.Module):
    def __init__(self, between=None):
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D, bias=False), nn.Linear(2 * D, D, bias=False)
        self.between = between or nn.GELU()
    def forward(self, x):
        return self.down(self.between(self.up(x)))

class Block(nn.Module):
    def __init__(self, attention=None, mlp=None):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attention, self.mlp = attention or Attention(), mlp or MLP()
    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))

class LM(nn.Module):
    def __init__(self, *blocks, head_first=False, tied=False):
        super().__init__()
        if head_first:
            self.head = nn.Linear(D, V, bias=False)
        self.tokens = nn.Embedding(V, D)
        self.layers = nn.ModuleList(blocks)
        if not head_first:
            self.head = nn.Linear(D, V, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def rows(module):
    return module.to(torch.bfloat16), torch.zeros(2, S, D, dtype=torch.bfloat16)
def ids(module):
    return module.to(torch.bfloat16), torch.zeros(2, S, dtype=torch.long)
"""


def judged(
    text: str, recipe: str = "torch.bf16", *, known: bool = False, **spec: object
) -> Judgement:
    ledger = load_ledger() if known else of_operators()
    return Judge(RECIPES, ledger).judge(case_of(register(text)[0], recipe, **spec))


def entries(found: Judgement) -> set[str]:
    """What is known of it besides of torch's own operators."""
    return {v.explained_by for v in found.known if v.rule != "O25"}


def causes(judgement: Judgement) -> list[tuple[str, str]]:
    return [(v.rule, v.symptom) for v in judgement.causes]


def one(judgement: Judgement, rule: str) -> Verdict:
    (verdict,) = (v for v in judgement.causes if v.rule == rule)
    return verdict


# Attention with masks.

MASKS = {
    "bool": "torch.ones(S, S, dtype=torch.bool, device=q.device).tril()",
    "float": "torch.linspace(-3, 3, S * S, device=q.device).view(S, S).to(q.dtype)",
    "-inf": "torch.full((S, S), float('-inf'), dtype=q.dtype, device=q.device).triu(1)",
    "least number": "torch.full((S, S), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)",
    "padding": "(torch.arange(S, device=q.device) < 11)[None, None, None].expand(2, 1, S, S)",
    "documents": "((torch.arange(S) // 5)[:, None] == torch.arange(S) // 5).tril()",
    "sliding": "torch.ones(S, S, dtype=torch.bool).tril().triu(-4)",
    "a row that sees nothing": "torch.ones(S, S, dtype=torch.bool).tril(-1)",
    "ALiBi": "((torch.arange(S) - torch.arange(S)[:, None]).clamp(max=0)[None, None]"
             " * torch.tensor([0.5, 0.25])[None, :, None, None]).to(q.dtype)"
             " + torch.full((S, S), float('-inf'), dtype=q.dtype).triu(1)",
}  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
def test_a_correct_mask_is_no_finding_and_is_judged(own: Own, mask: str) -> None:
    text = own(PARTS + f"def mask(q): return {MASKS[mask]}\n"
               "def build(): return rows(Block(Attention(mask)))\n")  # fmt: skip
    judgement = judged(text)
    assert not judgement.causes
    assert {v.status for v in judgement.verdicts if v.rule == "O18"} == {"ok"}


@pytest.mark.parametrize("by_flag", [False, True])
def test_heads_that_share_keys_are_no_finding(own: Own, by_flag: bool) -> None:
    text = own(PARTS + f"def build(): return rows(Block(Attention(kv=1, by_flag={by_flag})))\n")
    judgement = judged(text, checkpoint="selective")
    assert not judgement.causes
    assert {v.status for v in judgement.verdicts if v.rule == "O18"} == {"ok"}


def test_a_mask_that_is_another_in_backward_is_found_at_the_module_with_a_script(
    own: Own, scripts: RunScript
) -> None:
    """The second layer writes into the buffer that the first one handed to attention."""
    text = own(PARTS + """
KEPT = torch.full((S, S), float("-inf"), dtype=torch.bfloat16).triu(1)
class Rewrites(Attention):
    def forward(self, x):
        KEPT.data.copy_(torch.full((S, S), float("-inf")).triu(1))
        y = super().forward(x)
        KEPT.data.zero_()
        return y
def build(): return rows(Block(Rewrites(lambda q: KEPT)))
""")  # fmt: skip
    judge = Judge(RECIPES, of_operators())
    case = case_of(register(text)[0])
    verdict = one(judge.judge(case), "O18")
    assert verdict.symptom == "probabilities do not sum to 1"
    assert verdict.at.layer == "model.attention"
    assert triage(judge, case, verdict, seconds=2.0, scripts=scripts).confirmed


# Parameters and modules with two names.


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("recipe", ["torch.bf16", ROWWISE])
def test_a_tied_head_is_one_parameter(own: Own, recipe: str, head_first: bool) -> None:
    text = own(
        PARTS + f"def build(): return ids(LM(Block(), tied=True, head_first={head_first}))\n"
    )
    case = case_of(register(text)[0], recipe, steps=2, optimizer="adamw", checkpoint="full")
    assert not Judge(RECIPES, of_operators()).judge(case).causes
    names = ["model.head.weight", "model.tokens.weight"]
    first, second = names if head_first else names[::-1]
    assert ties(case.spec) == {second: first}
    assert {f"{n}.grad" for n in names} & gradient_names(case.spec) == {f"{first}.grad"}


def test_a_wrapper_that_unties_is_known_and_hides_nothing(own: Own) -> None:
    text = own(PARTS + "def build(): return ids(LM(Block(), tied=True))\n")
    found = judged(text, MX, backend="wrapper", steps=2)
    assert causes(found) == [("census", "tied weights untied")]
    found = judged(text, MX, backend="wrapper", steps=2, known=True)
    assert not found.causes and entries(found) == {"mx-wrapper-unties-weights"}
    lost = (
        PARTS
        + """
class Detached(LM):
    def forward(self, ids):
        with torch.no_grad():
            x = self.tokens(ids)
        return self.head(self.layers[0](x))
def build():
    return ids(Detached(Block()))
"""
    )
    # an embedding whose table gets no gradient is no business of the wrapper's, nor the wrapper its
    assert not judged(own(lost, name="other.py"), MX, backend="wrapper").causes


@pytest.mark.parametrize("checkpoint", ["none", "full", "selective"])
@pytest.mark.parametrize("recipe", ["torch.bf16", ROWWISE])
def test_a_block_that_is_called_twice_is_recomputed_as_it_was(
    own: Own, recipe: str, checkpoint: str
) -> None:  # fmt: skip
    """The last call is recomputed first."""
    text = own(PARTS + "block = Block()\ndef build(): return ids(LM(block, block))\n")
    assert not judged(text, recipe, checkpoint=checkpoint, steps=2).causes


TWICE = """
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(D, D)
        self.second = self.first
        self.third = nn.Linear(D, D)
        self.fourth = nn.Linear(D, D)
        self.fourth.weight = self.third.weight
    def forward(self, x):
        x = F.relu_(self.second(F.gelu(self.first(x))))
        return self.fourth(F.gelu(self.third(x)))
def build(): return rows(Twice())
"""


def test_a_linear_under_two_names_is_known_and_its_gradient_is_not_said_to_be_wrong(
    own: Own,
) -> None:
    text = own(PARTS + TWICE)
    assert not judged(text).causes
    assert causes(judged(text, ROWWISE)) == [("census", "second name left unconverted")]
    known = judged(text, ROWWISE, known=True)
    assert not known.causes
    assert {v.explained_by for v in known.known} == {"float8-linear-registered-twice"}


# Gradients that are not there.

EXPERTS = """
class Experts(nn.Module):
    def __init__(self, count, chosen="weight"):
        super().__init__()
        self.gate = nn.Linear(D, count, bias=False)
        self.experts = nn.ModuleList(MLP() for _ in range(count))
    def forward(self, x):
        flat = x.reshape(-1, D)
        weights, chosen = self.gate(flat).float().softmax(-1).to(x.dtype).max(-1)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            mine = (chosen == i).nonzero().squeeze(-1)
            if len(mine):
                y = y.index_add(0, mine, expert(flat[mine]) * weights[mine, None])
        return y.view_as(x)
def build(): return Experts(12).to(torch.bfloat16), torch.zeros(1, 8, D, dtype=torch.bfloat16)
"""


@pytest.mark.parametrize("recipe", ["torch.bf16", ROWWISE, TENSORWISE])
def test_an_expert_without_tokens_is_no_finding(own: Own, recipe: str) -> None:
    text = own(PARTS + EXPERTS)
    judge = Judge(RECIPES, of_operators())
    case = case_of(register(text)[0], recipe, checkpoint="full")
    evidence = judge.observe(case)
    idle = evidence.gradients - set(evidence.traces["eager"].outputs)
    assert idle, "with 8 rows there are idle ones among 12 experts"
    assert not judge.judge(case).causes


@pytest.mark.parametrize(
    "change",
    [
        "model.unused = nn.Linear(D, D)",
        "model.up.requires_grad_(False)",
        "model.requires_grad_(False); model.down.weight.requires_grad_(True)",
    ],
)
def test_an_unused_branch_and_frozen_parameters_are_no_finding(own: Own, change: str) -> None:
    text = own(PARTS + f"def build():\n    model = MLP()\n    {change}\n    return rows(model)\n")
    for recipe in ("torch.bf16", ROWWISE):
        assert not judged(text, recipe, steps=2).causes


CACHED = """
class Cached(nn.Linear):
    kept = None
    def forward(self, x):
        if self.kept is None:
            self.kept = self.weight.detach().to(x.dtype)
        return F.linear(x, self.kept)
def build():
    block = Block()
    block.mlp.down = Cached(2 * D, D, bias=False)
    return rows(block)
"""


def test_a_weight_that_is_cached_over_steps_is_found_at_its_layer(
    own: Own, scripts: RunScript
) -> None:
    """The model unconverted has no gradient there, either: it is the model's own loss."""
    judge = Judge(RECIPES, of_operators())
    events = (Forward(), Backward(of=(0,)), Step(), Forward(), Backward(of=(1,)))
    case = case_of(register(own(PARTS + CACHED))[0], events=events)
    verdict = one(judge.judge(case), "contract")
    assert verdict.expect == Present(("model.mlp.down.weight.grad",))
    assert triage(judge, case, verdict, seconds=2.0, scripts=scripts).confirmed


CASTS = """
class Casts(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))
def build():
    block = Block()
    block.mlp.down = Casts(2 * D, D, bias=False)
    return rows(block)
"""


def test_products_of_a_linear_with_a_forward_of_its_own_are_judged(own: Own) -> None:
    """Those of its backward, too; nn.Linear's are judged as layers."""
    judgement = judged(own(PARTS + CASTS))
    found = [v for v in judgement.verdicts if v.rule == "O25" and v.role == "mm"]
    assert [v.status for v in found] == ["ok"] * 3
    assert not judgement.causes


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


# Whose output it is.

OTHER = """
class OtherDropout(nn.Module):
    "Dropout with a generator of its own, which no checkpoint puts back."
    def __init__(self):
        super().__init__()
        self.draws = torch.Generator().manual_seed(0)
    def forward(self, x):
        if torch._C._current_graph_task_id() == -1:
            self.draws.manual_seed(0)
        return x * (torch.rand(x.shape, generator=self.draws) > 0.1)
"""


@pytest.mark.parametrize(
    ("where", "module"),
    [
        ("Block(mlp=MLP(OtherDropout()))", "model.mlp.between"),
        ("nn.Sequential(Block(), OtherDropout())", "model.1"),
    ],
)
def test_dropout_that_differs_in_recompute_is_named_itself_and_has_a_script(
    own: Own, where: str, module: str, scripts: RunScript
) -> None:  # fmt: skip
    judge = Judge(RECIPES, of_operators())
    case = case_of(register(own(PARTS + OTHER + f"def build(): return rows({where})\n"))[0],
                   checkpoint="full")  # fmt: skip
    judgement = judge.judge(case)
    assert {v.at.layer for v in judgement.causes} == {module}
    (verdict, *_) = judgement.causes
    assert verdict.at.phase == "recompute" and verdict.expect.at.phase == "forward"  # type: ignore[union-attr]
    result = triage(judge, case, verdict, seconds=2.0, scripts=scripts)
    assert result.confirmed, result.finding.why_suspected


SCALES_ITS_INPUT = """
class ScalesItsInput(Block):
    "A norm undoes what it writes, but for a rounding: the forward's values hardly differ."
    def forward(self, x):
        x.data.mul_(1.5)
        return x + self.mlp(self.norm2(x))
"""


def test_a_recomputation_with_wrong_gradients_weighs_what_these_do(own: Own) -> None:
    """What differs first does so by a rounding; the gradients before it, by a third."""
    judge = Judge(RECIPES, of_operators())
    case = case_of(register(own(PARTS + SCALES_ITS_INPUT
                                + "def build(): return ids(LM(ScalesItsInput()))\n"))[0],
                   checkpoint="full")  # fmt: skip
    causes = judge.judge(case).causes
    assert {v.rule for v in causes} >= {"O13"}
    for verdict in causes:
        assert effect_of(observed(judge, case, verdict), verdict) > LARGE


def test_a_forward_that_counts_its_calls_is_named_by_the_module_that_counts(own: Own) -> None:
    text = own(PARTS + """
class Counts(nn.Module):
    calls = 0
    def forward(self, x):
        self.calls += 1
        return F.gelu(x) * (1 + self.calls % 2)
def build(): return ids(LM(Block(), Block(mlp=MLP(Counts()))))
""")  # fmt: skip
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.between \(Counts\)"):
        judged(text)  # it is refused before anything is judged


def test_what_an_activation_writes_in_place_is_not_the_linears_output(own: Own) -> None:
    text = own(PARTS + "def build(): return rows(MLP(nn.ReLU(inplace=True)))\n")
    assert not judged(text, checkpoint="full").causes
    for backend in RECIPES["torch.scaled_mm"].backends:
        assert not judged(text, "torch.scaled_mm", backend=backend).causes
    # torchao's layers return a view that nobody may write into, and a tap must not hide that
    for recipe in (ROWWISE, MX):
        verdict = one(judged(text, recipe), "contract")
        assert (verdict.status, verdict.at.what) == ("crashed", "error")
        known = judged(text, recipe, known=True)
        assert not known.causes
        assert {v.explained_by for v in known.known} == {"linear-output-in-place"}


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
