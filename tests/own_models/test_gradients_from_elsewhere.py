"""Models whose gradients are not those of their linears' products alone, and models of other
dtypes: nothing is claimed of them that is not so."""

from __future__ import annotations

import pytest
from narrowfuzz.own_models import register
from narrowfuzz.plants.registry import builtin_plants
from test_own_causes import ROWWISE, judged
from test_own_models import Own, own

__all__ = ["own"]  # a fixture

HEAD = """
from torch.func import functional_call
from torch.nn.utils import parametrize
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
    def forward(self, x):
        return self.b(self.a(x).relu())
class Model(Two):
{}
def build():
    return Model(), torch.linspace(-2, 2, 16 * 32).view(16, 32)
"""
#: Body of a class -> what its gradients also come from, or pass through.
MODELS = {
    "a transposed weight": ("""
    def forward(self, x):
        return F.linear(self.a(x).relu(), self.a.weight.t())
""", {"a.weight"}),
    "a weight that is scaled": ("""
    def forward(self, x):
        weight = self.b.weight * self.a(x).mean(0, keepdim=True).sigmoid().t()
        return functional_call(self.b, {"weight": weight, "bias": self.b.bias}, (x,))
""", {"b.weight"}),
    "a weight in a reentrant checkpoint": ("""
    def inner(self, x):
        return self.b(x) + x @ (self.a.weight * 0.5)
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, self.a(x), use_reentrant=True)
""", {"a.weight"}),
    "only its own product in a reentrant checkpoint": ("""
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x * 1, use_reentrant=True)
""", set()),
    "a weight in a function that recomputes": ("""
    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, run, x):
            ctx.run = run
            ctx.save_for_backward(x)
            return run(x)
        @staticmethod
        def backward(ctx, g):
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                y = ctx.run(x)
            torch.autograd.backward(y, g)
            return None, x.grad
    def inner(self, x):
        return self.b(x) + x @ (self.a.weight * 0.5)
    def forward(self, x):
        return self.Recomputed.apply(self.inner, self.a(x))
""", {"a.weight"}),
    "a hook that a forward adds": ("""
    def forward(self, x):
        hook = self.b.register_full_backward_hook(lambda m, gi, go: (gi[0] / 2,))
        y = super().forward(x)
        hook.remove()
        return y
""", {"b.input"}),
    "a masked gradient": ("""
    def __init__(self):
        super().__init__()
        self.b.weight.register_hook(lambda g: g * (torch.arange(32) < 8)[:, None])
""", {"b.weight"}),
    "a gradient moved elsewhere": ("""
    def __init__(self):
        super().__init__()
        self.main = torch.zeros(32, 32)
        def moved(p):
            self.main += p.grad
            p.grad = None
        self.a.weight.register_post_accumulate_grad_hook(moved)
""", {"a.weight"}),
    "clamped by backward hooks": ("""
    def __init__(self):
        super().__init__()
        self.a.register_full_backward_hook(lambda m, gi, go: (gi[0].clamp(-1e-3, 1e-3),))
""", {"a.input"}),
    "forces": ("""
    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            u = self.b(self.a(x).tanh()).sin().sum()
            (force,) = torch.autograd.grad(u, x, create_graph=True)
        return u, force
""", {f"{n}.{p}" for n in "ab" for p in ("weight", "bias", "input")}),
    "adversarial inputs": ("""
    def forward(self, x):
        with torch.enable_grad():
            near = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(super().forward(near).square().mean(), near)
        return super().forward(x + 0.1 * g.sign())
""", {f"{n}.{p}" for n in "ab" for p in ("weight", "bias")}),
    "frozen for a while": ("""
    def forward(self, x):
        self.b.requires_grad_(False)
        y = super().forward(x)
        self.b.requires_grad_(True)
        return y
""", set()),
    "a learned vector": ("""
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.linspace(-1, 1, 32))
    def forward(self, x):
        return self.a(x) + self.b(self.token)
""", set()),
    "arguments by keyword": ("""
    def forward(self, x):
        return self.b(input=self.a(input=x).relu())
""", set()),
    "complex numbers": ("""
    def __init__(self):
        super().__init__()
        self.modes = nn.Parameter(torch.ones(17, dtype=torch.cfloat) * (1 + 2j))
    def forward(self, x):
        return self.b(torch.fft.irfft(torch.fft.rfft(self.a(x)) * self.modes, n=32))
""", set()),
    "float64": ("""
    def __init__(self):
        super().__init__()
        self.b = self.b.double()
    def forward(self, x):
        return self.b(self.a(x).double())
""", set()),
    "integers and sparse gradients": ("""
    def __init__(self):
        super().__init__()
        self.base = nn.Parameter(torch.ones(32, 32, dtype=torch.int8), requires_grad=False)
        self.table = nn.Embedding(8, 32, sparse=True)
    def forward(self, x):
        return super().forward(x @ self.base.to(x.dtype) + self.table(torch.arange(16) % 8))
""", set()),
    "64-bit codes in order": ("""
    def forward(self, x):
        codes = (torch.arange(16) * 7 % 4 << 40) + torch.arange(16).flip(0)
        return super().forward(x[torch.sort(codes, stable=True).indices])
""", set()),
    "ring attention": ("""
    def forward(self, x):
        q, k, v = (t.view(1, 2, 16, 16) for t in (self.a(x), self.b(x), x + 0 * self.a(x)))
        return Ring.apply(q, k, v).view(16, 32)
class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        parts = [run(q, a, b)[:2] for a, b in zip(k.chunk(2, 2), v.chunk(2, 2))]
        lse = torch.logsumexp(torch.stack([l for _, l in parts]), 0)
        out = sum(o * (l - lse).exp()[..., None] for o, l in parts)
        ctx.save_for_backward(q, k, v, out, lse)
        return out
    @staticmethod
    def backward(ctx, g):
        q, k, v, out, lse = ctx.saved_tensors
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        parts = [run(g.contiguous(), q, a, b, out, lse, 0.0, False)
                 for a, b in zip(k.chunk(2, 2), v.chunk(2, 2))]
        dq, dk, dv = zip(*parts)
        return sum(dq), torch.cat(dk, 2), torch.cat(dv, 2)
""", set()),
}  # fmt: skip
WAYS = {"once": {}, "recomputed": {"checkpoint": "full"}, "twice": {"steps": 2, "microbatches": 2}}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_what_legal_models_do_is_no_finding(own: Own, name: str) -> None:
    body, elsewhere = MODELS[name]
    text = own(HEAD.format(body))
    assert set(register(text)[0].gradients.elsewhere) == {f"model.{one}" for one in elsewhere}
    for spec in WAYS.values():
        found = judged(text, "torch.fp32", dtype="fp32", **spec)
        assert found.ran and not found.causes, [(v.rule, v.symptom) for v in found.causes]


#: A critic that is frozen for the last of so many losses.
FROZEN = """
    def forward(self, x):
        y = sum(self.b(self.a(x + i).relu()) for i in range({} - 1))
        self.b.requires_grad_(False)
        z = self.b(self.a(x).tanh())
        self.b.requires_grad_(True)
        return y + z
"""


@pytest.mark.parametrize("losses", [2, 3])
def test_a_call_with_a_frozen_weight_adds_nothing_to_its_gradient(own: Own, losses: int) -> None:
    text = own(HEAD.format(FROZEN.format(losses)))
    for way in ("once", "twice"):
        assert not judged(text, "torch.fp32", dtype="fp32", **WAYS[way]).causes
    plant = {2: "bias-gradient-loses-row", 3: "gradient-never-cleared"}[losses]
    with builtin_plants()[plant].plant():
        verdicts = judged(text, ROWWISE, dtype="fp32", steps=losses - 1).verdicts
    wrong = {(v.rule, v.at.layer or v.at.name) for v in verdicts if v.status == "diverged"}
    assert wrong & {("O16", "model.b"), ("O21", "model.b.weight.grad")}, wrong


def test_a_recompute_that_ends_while_a_weight_is_frozen_is_found(own: Own) -> None:
    """torch's checkpoint ends a recompute as soon as it has all tensors, so nothing thaws it."""
    (cause,) = judged(
        own(HEAD.format(FROZEN.format(2))), "torch.fp32", dtype="fp32", checkpoint="full"
    ).causes
    assert cause.symptom == "gradient missing in one run"


def test_what_is_used_nowhere_else_is_judged(own: Own) -> None:
    text = own(HEAD.format(MODELS["a transposed weight"][0]))
    with builtin_plants()["bias-gradient-loses-row"].plant():
        assert judged(text, ROWWISE, dtype="fp32").causes
