"""Stand-alone scripts for findings of rule census: build a model, describe it, convert it, and
compare it with the description.

A table has for each class of change an expression over ``model``, and whether its value must not
lose members, gain members, or change at a name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from narrowfuzz.case.spec import Case, Spec
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.recipe.recipe import Recipe
from narrowfuzz.trace.trace import ChangeKind
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.script.parts import TORCH_NAME, model_source
from narrowfuzz.triage.script.recipe_source import recipe_source
from narrowfuzz.triage.script.short import Short

_MODULES = "model.named_modules(remove_duplicate=False)"
_PARAMETERS = "model.named_parameters(remove_duplicate=False)"
_HOOKS = (
    "('_forward_pre_hooks', '_forward_hooks', '_backward_pre_hooks', '_backward_hooks',\n"
    "         '_state_dict_hooks', '_state_dict_pre_hooks', '_load_state_dict_pre_hooks',\n"
    "         '_load_state_dict_post_hooks')"
)
_INTERNAL = "{*vars(torch.nn.Module()), 'forward'}"
_FORWARD = "getattr(m.forward, '__qualname__', '?')"


@dataclass(frozen=True)
class _View:
    """A description of a model: ``expression`` gives a set for lost and gained, and a dict by name
    for changed."""

    expression: str
    bad: Literal["lost", "gained", "changed"]


def _pairs(named: str) -> str:
    return f"{{(n, k) for n, x in {named}\n            for k, y in {named} if x is y and n < k}}"


def _modules(value: str, *, where: str = "True") -> str:
    return f"{{n: {value} for n, m in {_MODULES} if {where}}}"


def _parameters(value: str) -> str:
    return f"{{n: {value} for n, p in {_PARAMETERS}}}"


#: Changes that are described by the recipe's own functions: the modules that are convertible
#: before, and those that are converted after.
_CHOSEN: dict[ChangeKind, Literal["lost", "gained"]] = {
    "left unconverted": "lost",
    "second name left unconverted": "lost",
    "converted unasked": "gained",
}
_VIEWS: dict[ChangeKind, _View] = {
    "own forward lost": _View(_modules(_FORWARD, where="NOT_PLAIN or not choosing"), "changed"),
    "forward changed": _View(_modules(_FORWARD, where="not chosen(m, n)"), "changed"),
    "module type changed": _View(_modules("type(m).__name__", where="not chosen(m, n)"), "changed"),
    "module missing": _View(f"{{n for n, m in {_MODULES}}}", "lost"),
    "module added": _View(f"{{n for n, m in {_MODULES}}}", "gained"),
    "shared module split": _View(_pairs(_MODULES), "lost"),
    "training flag changed": _View(_modules("m.training"), "changed"),
    "hooks lost": _View(
        f"{{(n, kind, i) for n, m in {_MODULES} for kind in {_HOOKS}\n"
        "            for i in range(len(getattr(m, kind, ())))}",
        "lost",
    ),
    "attributes lost": _View(
        f"{{(n, a) for n, m in {_MODULES} for a in vars(m)\n            if a not in {_INTERNAL}}}",
        "lost",
    ),
    "attributes changed": _View(
        f"{{(n, a): v for n, m in {_MODULES} for a, v in vars(m).items()\n"
        f"            if a not in {_INTERNAL} and isinstance(v, (int, float, str))}}",
        "changed",
    ),
    "tied weights untied": _View(_pairs(_PARAMETERS), "lost"),
    "weights tied": _View(_pairs(_PARAMETERS), "gained"),
    "parameter missing": _View(f"{{n for n, p in {_PARAMETERS}}}", "lost"),
    "parameter added": _View(f"{{n for n, p in {_PARAMETERS}}}", "gained"),
    "parameter type changed": _View(
        f"{{(n, k): type(p).__name__ for n, m in {_MODULES} if not chosen(m, n)\n"
        "            for k, p in m.named_parameters(recurse=False)}",
        "changed",
    ),
    "parameter shape changed": _View(_parameters("p.shape"), "changed"),
    "parameter dtype changed": _View(_parameters("p.dtype"), "changed"),
    "parameter device changed": _View(_parameters("p.device"), "changed"),
    "parameter order changed": _View(f"{{'order': [n for n, p in {_PARAMETERS}]}}", "changed"),
    "parameter hooks lost": _View(
        f"{{(n, kind, i) for n, p in {_PARAMETERS}\n"
        "            for kind in ('_backward_hooks', '_post_accumulate_grad_hooks')\n"
        "            for i in range(len(getattr(p, kind, None) or ()))}",
        "lost",
    ),
    "parameter attributes lost": _View(
        f"{{(n, a) for n, p in {_PARAMETERS} for a in vars(p)}}", "lost"
    ),
    "requires_grad changed": _View(_parameters("p.requires_grad"), "changed"),
    "buffer missing": _View("{n for n, b in model.named_buffers(remove_duplicate=False)}", "lost"),
    "buffer added": _View("{n for n, b in model.named_buffers(remove_duplicate=False)}", "gained"),
    "buffer changed": _View(
        "{n: (b.shape, b.dtype, b.device)\n"
        "            for n, b in model.named_buffers(remove_duplicate=False)}",
        "changed",
    ),
    "state_dict keys changed": _View("{'keys': list(model.state_dict())}", "changed"),
}
_BAD = {
    "lost": "sorted(before - after)",
    "gained": "sorted(after - before)",
    "changed": "[(n, v, after[n]) for n, v in before.items() if n in after and v != after[n]]",
}


def of_conversion(case: Case, verdict: Verdict, recipe: Recipe, model: str = "") -> Short:
    """The script of a change that a conversion made. ``model`` is source that assigns ``model`` and
    uses nothing but torch and ``dtype``; "" stands for the Spec's model."""
    spec = case.spec
    return Short(
        verdict,
        spec.recipe,
        f"import collections\nimport torch\ntorch.set_num_threads(1)\n"
        f"dtype = {TORCH_NAME[spec.dtype]}",
        (
            recipe_source(recipe, spec, "convert", "converted", "convertible"),
            model or (_linear(spec) if spec.model == "linear" else _model(spec)),
            _describe(verdict.symptom),
            "before = describe(model, True)\n"
            "model = convert(model)\nafter = describe(model, False)",
            f"bad = {_BAD[_bad(verdict.symptom)]}",
            f'print("{verdict.symptom}:", bad or "none")\nsys.exit(1 if bad else 0)',
        ),
    )


def _model(spec: Spec) -> str:
    """Source that assigns the Spec's model."""
    model = MODELS[spec.model]
    cast = "" if model.own else f".to({TORCH_NAME[spec.dtype]})"  # a user's keeps its dtypes
    return (
        "import math\nimport torch.nn.functional as F\nfrom torch import nn\n"
        f"{model_source(spec.model)}\n\n\nmodel = {model.expression(spec)}{cast}"
    )


def _linear(spec: Spec) -> str:
    return (
        "model = torch.nn.Sequential(collections.OrderedDict(\n"
        f"    proj=torch.nn.Linear({spec.k}, {spec.n}, {spec.bias}, dtype=dtype)))"
    )


def _bad(symptom: str) -> str:
    if symptom in _CHOSEN:
        return _CHOSEN[symptom]  # type: ignore[index]
    if symptom in _VIEWS:
        return _VIEWS[symptom].bad  # type: ignore[index]
    raise ValueError(f"no stand-alone script for census symptom {symptom!r}")


def _describe(symptom: str) -> str:
    """Source of describe(model, choosing), which returns the description that is compared;
    ``choosing`` is True before conversion."""
    _bad(symptom)
    if symptom in _CHOSEN:
        return (
            "def describe(model, choosing):\n"
            f"    return {{n for n, m in {_MODULES}\n"
            "            if (convertible(m, n) if choosing else converted(m))}"
        )
    expression = _VIEWS[symptom].expression  # type: ignore[index]
    lines = ["def describe(model, choosing):"]
    if "chosen(" in expression:
        # modules that conversion replaces may change: their names are left out on both sides
        lines += [
            "    def chosen(m, n):",
            "        return convertible(m, n) if choosing else converted(m)",
        ]
    plain = f"{_FORWARD} != 'Linear.forward'"
    return "\n".join([*lines, f"    return {expression.replace('NOT_PLAIN', plain)}"])
