"""Two tests of a recipe as one would write them without narrowfuzz.

``compiled`` is a Hypothesis test: a layer in eager mode against the same under torch.compile, by
torch.testing's own tolerances. ``as_shipped`` has the shapes and thresholds of the libraries' own
suites: torchao's test_base.py and test_numerics_integration.py of float8, its test_mxfp8_linear.py,
and TransformerEngine's test_float8_current_scaling_exact.py.

A test returns an Outcome, which holds a failure as text.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from narrowfuzz.case.events import Settings
from narrowfuzz.case.spec import Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.recipe.source import CONVERTED, LIBRARY
from plain_hypothesis import generate
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Outcome:
    """The result of a test: the number of cases compared, and how one failed."""

    cases: int
    failure: str = ""
    #: Why nothing could be compared.
    not_applicable: str = ""


#: Models in which the two modes agree. If anything precedes or follows a quantised linear, sums and
#: activations are rounded at other places, and a quantiser turns that into a step of FP8; the
#: author of such a test would leave these models out.
_QUANTISED = ("linear",)
_PLAIN = ("linear", "mlp_gelu", "rmsnorm_linear", "attention")
#: Hypothesis's own default.
MOST_EXAMPLES = 100
_SPECIAL_LAYERS = "the library takes its layers out of torch.compile"


def compiled(recipes: Sequence[Recipe], seconds: float, seed: int, most: int) -> Outcome:
    """At most ``most`` examples, none begun after ``seconds``; the first failure ends the test.

    The drawn examples depend only on ``seed`` and the recipes.
    """
    if any(isinstance(r, Recipe) and r.process for r in recipes):
        return Outcome(0, not_applicable=_SPECIAL_LAYERS)
    start, cases = time.monotonic(), 0
    failures: list[str] = []

    def test(drawn: tuple[Recipe, Spec, int]) -> None:
        nonlocal cases
        if failures or cases == most or (cases and time.monotonic() - start > seconds):
            return
        cases += 1
        failures.extend(_failure_of(partial(_eager_and_compiled, *drawn)))

    strategy = st.sampled_from(recipes).flatmap(_examples)
    generate(strategy, test, number=seed, examples=MOST_EXAMPLES)
    return Outcome(cases, failures[0] if failures else "")


def _examples(recipe: Recipe) -> Any:
    sizes = st.integers(1, 6).map(lambda n: n * recipe.alignment)
    if recipe.source is LIBRARY:
        specs = st.builds(
            lambda m, k, bias: Spec(
                recipe=recipe.name, model="library_linear", m=m, k=k, n=k, bias=bias
            ),
            sizes, sizes, st.booleans(),
        )  # fmt: skip
    else:
        specs = st.builds(
            partial(Spec, recipe=recipe.name),
            backend=st.sampled_from(recipe.backends),
            model=st.sampled_from(_PLAIN if recipe.family == "torch" else _QUANTISED),
            m=sizes, k=sizes, n=sizes, bias=st.booleans(),
        )  # fmt: skip
    return st.tuples(st.just(recipe), specs, st.integers(0, 2**31))


def _eager_and_compiled(recipe: Recipe, spec: Spec, seed: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model, region, backward = _made(recipe, spec)
    x, grad = (torch.randn(shape).bfloat16() for shape in (spec.input_shape, spec.output_shape))
    other = copy.deepcopy(model)
    eager = _step(model, x, grad, region, backward)
    assert_close(_step(torch.compile(other), x, grad, region, backward, other), eager)


def _made(recipe: Recipe, spec: Spec) -> tuple[nn.Module, Callable[[], Any], Any]:
    """The model, a function that returns the region to run it in, and its backward function."""
    if recipe.source is CONVERTED:
        model = MODELS[spec.model].build(spec, dtype=torch.bfloat16, device="cpu")
        return recipe.convert(model, spec), nullcontext, torch.autograd.backward
    subject = recipe.subject("cpu")
    layer = subject.layer(spec, Settings())
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return (
        layer,
        lambda: subject.autocast(Settings()),
        lambda out, g: subject.backward([out], [g], False),
    )


def _step(
    call: Callable[[Any], Any], x: Any, grad: Any, region: Callable[[], Any], backward: Any,
    model: nn.Module | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Output and gradients of one forward and backward."""
    x = x.clone().requires_grad_()
    with region():
        out = call(x)
    backward(out, grad)
    module = model or call
    assert isinstance(module, nn.Module)
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"output": out.detach(), "grad_input": x.grad, **grads}


def as_shipped(recipes: Sequence[Recipe], seconds: float, seed: int, most: int) -> Outcome:
    """Every case of the suites of these recipes, however long it takes; at most ``most``."""
    cases = 0
    for recipe in recipes:
        for test in itertools.islice(_suite(recipe), most - cases):
            torch.manual_seed(seed)
            cases += 1
            for failure in _failure_of(test):
                return Outcome(cases, f"{recipe.name}: {failure}")
    none = "" if cases else "no suite tests one of its recipes"
    return Outcome(cases, not_applicable=none)


def _failure_of(test: Callable[[], None]) -> Iterator[str]:
    try:
        test()
    except Exception as error:
        message = " ".join(str(error).split())
        yield f"{type(error).__name__}: {message}"[:300]


def _suite(recipe: Recipe) -> Iterator[Callable[[], None]]:
    if recipe.source is LIBRARY:
        yield from (partial(_te_linear, recipe, layer) for layer in _te_layers(recipe))
    elif recipe.family == "torchao.float8":
        backends = recipe.backends if recipe.name.endswith("tensorwise") else ("real",)
        again = (False, True) if recipe.name.endswith("tensorwise") else (False,)
        shapes = ((16, 16), (2, 16, 16), (3, 2, 16, 16))
        for case in itertools.product(
            backends, shapes, (torch.bfloat16, torch.float32), (False, True), again
        ):
            yield partial(_float8_linear, recipe, *case)
        yield from (partial(_feed_forward, recipe, backend) for backend in backends)
    elif recipe.name.startswith("torchao.mxfp8.rceil"):
        yield from (partial(_mxfp8_linear, recipe, bias) for bias in (False, True))


def _sqnr(reference: Any, value: Any) -> float:
    """Signal to quantisation noise in dB."""
    reference, value = reference.detach().float(), value.detach().float()
    noise = torch.linalg.vector_norm(reference - value)
    return float(20 * torch.log10(torch.linalg.vector_norm(reference) / noise))


def _at_least(threshold: float, what: str, reference: Any, value: Any) -> None:
    found = _sqnr(reference, value)
    # NaN is below any threshold
    if not found >= threshold:
        raise AssertionError(f"{what} at {found:.1f} dB, below {threshold:g}")


def _pair(recipe: Recipe, spec: Spec, model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return model, recipe.convert(copy.deepcopy(model), spec)


def _float8_linear(
    recipe: Recipe, backend: str, shape: Sequence[int], dtype: Any, bias: bool, again: bool
) -> None:
    spec = Spec(recipe=recipe.name, backend=backend, bias=bias)
    linear = nn.Sequential(nn.Linear(16, 32, bias=bias, dtype=dtype))
    reference, float8 = _pair(recipe, spec, linear)
    x = torch.randn(*shape, dtype=dtype)
    for _ in range(2):
        wanted, out = (
            checkpoint(model, x, use_reentrant=False) if again else model(x)
            for model in (reference, float8)
        )
        wanted.sum().backward()
        out.sum().backward()
    _at_least(18.0, "output", wanted, out)
    _at_least(17.0, "grad_weight", reference[0].weight.grad, float8[0].weight.grad)
    if bias:
        assert_close(float8[0].bias.grad, reference[0].bias.grad)


def _feed_forward(recipe: Recipe, backend: str) -> None:
    """torchao's feed-forward test: it has the shapes of a Llama 70B, here a sixteenth of them."""
    spec = Spec(recipe=recipe.name, backend=backend, model="mlp_swiglu", m=512, k=256, n=896)
    block = MODELS["mlp_swiglu"].build(spec, dtype=torch.bfloat16, device="cpu")
    reference, float8 = _pair(recipe, spec, block)
    for _ in range(2):
        x = torch.randn(1, 512, 256, dtype=torch.bfloat16)
        for model in (reference, float8):
            model.zero_grad()
        wanted, out = reference(x), float8(x)
        wanted.sum().backward()
        out.sum().backward()
    _at_least(20.0, "output", wanted, out)
    theirs = dict(float8.named_parameters())
    for name, parameter in reference.named_parameters():
        _at_least(20.0, f"gradient of {name}", parameter.grad, theirs[name].grad)


def _mxfp8_linear(recipe: Recipe, bias: bool) -> None:
    spec = Spec(recipe=recipe.name, backend="linear", bias=bias)
    linear = nn.Sequential(nn.Linear(1024, 2048, bias=bias, dtype=torch.bfloat16))
    reference, mxfp8 = _pair(recipe, spec, linear)
    x = torch.randn(1024, 1024, dtype=torch.bfloat16, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    wanted, out = reference(x), mxfp8(other)
    _at_least(26.0 if bias else 27.0, "output", wanted, out)
    for result in (wanted, out):
        F.mse_loss(result, torch.ones_like(result)).backward()
    _at_least(25.0, "grad_input", x.grad, other.grad)
    weight = 34.0 if recipe.name.endswith("wgrad_with_hp") else 24.0
    _at_least(weight, "grad_weight", reference[0].weight.grad, mxfp8[0].weight.grad)
    if bias:
        _at_least(40.0, "grad_bias", reference[0].bias.grad, mxfp8[0].bias.grad)


def _te_layers(recipe: Recipe) -> tuple[str, ...]:
    return ("linear", "layernorm_linear") if recipe.process else ("linear",)


def _te_linear(recipe: Recipe, kind: str) -> None:
    """One step outside and one inside of a region, compared by the mean relative error."""
    subject = recipe.subject("cpu")
    rows = max(16, recipe.alignment)
    spec = Spec(
        recipe=recipe.name, model=f"library_{kind}", m=rows, k=256, n=256, bias=True,
    )  # fmt: skip
    layer = subject.layer(spec, Settings())
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name in ("weight", "bias"):
                parameter.copy_(torch.randn(parameter.shape))
    x, grad = (torch.randn(rows, 256).bfloat16() for _ in range(2))
    regions: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
        nullcontext,
        lambda: subject.autocast(Settings()),
    )
    results = []
    for region in regions:
        layer.zero_grad()
        results.append(
            _step(layer, x, grad, region, lambda out, g: subject.backward([out], [g], False))
        )
    wanted, found = results
    for name, limit in (("output", 0.5), ("grad_input", 1.0), ("weight", 1.0), ("bias", 0.5)):
        error = float(((found[name] - wanted[name]) / wanted[name]).float().abs().mean())
        if not error < limit:
            raise AssertionError(f"{kind}: mean relative error {error:.3g} of {name}, not {limit}")
