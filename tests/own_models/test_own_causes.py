"""What is said of attention and of other modules of users' own models is true of them."""

from __future__ import annotations

import pytest
from narrowfuzz.judge.fold import Judgement
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import load_ledger
from narrowfuzz.ledger.severity import LARGE
from narrowfuzz.own_models import register
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.effect import effect_of, observed
from narrowfuzz.triage.triage import triage
from narrowfuzz.triage.verify import RunScript
from samples import of_operators
from test_own_models import RECIPES, Own, case_of, own

__all__ = ["own"]  # a fixture

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


@pytest.mark.one_in(3)
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


@pytest.mark.one_in(2)
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
