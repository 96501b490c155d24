"""The first lines that ``narrowfuzz check`` prints: what is checked, for how long, and notes on the
model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from narrowfuzz.arms.available import select_arms
from narrowfuzz.campaign.config import MINUTES
from narrowfuzz.campaign.run_options import RunOptions
from narrowfuzz.case.arm import Compile
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.layout.mesh import why_alone, why_not_fsdp
from narrowfuzz.case.spec import Checkpoint, Spec, ValueClass
from narrowfuzz.draw.strategies import WILD
from narrowfuzz.ledger.advice import of_models
from narrowfuzz.ledger.facts import Fact
from narrowfuzz.machine.device import torch_name
from narrowfuzz.models.model import Model
from narrowfuzz.recipe.recipe import FILTERED, Emit, Recipe, named, no_tap
from narrowfuzz.trace.words import few, plural

#: The kinds of data on which the user's configuration is judged first, from tame to wild.
VALUES: tuple[ValueClass, ...] = (
    "gaussian",
    "outlier",
    "heavy_tail",
    "zero_rows",
    "binade_edges",
    "inf_nan",
)

#: Seconds that a compiler takes on an idle core with empty caches: a constant, and the increase for
#: each linear. Measured on tests/own_models with torchao.float8.rowwise.
_COMPILES = {"aot_eager": (3.0, 0.6), "inductor": (10.0, 3.0)}
#: The share of a run's time that the first compilation may take without a warning.
_SHARE = 0.6
#: How many buffers or parameters a note names.
_NAMED = 6
#: A number of tokens that every recipe takes.
_PLAIN_TOKENS = 256


@dataclass(frozen=True)
class Configuration:
    """A user's model and the configuration in which it is trained."""

    options: RunOptions
    model: Model
    #: The same model, built with other values of the parameters of ``build``.
    others: Sequence[Model]
    compile: Compile
    checkpoint: Checkpoint
    #: Globs of the linears that the recipes convert, as ``recipe.named`` reads them.
    only: tuple[str, ...]
    #: Names of the requested recipes, and the recipes of them that run here.
    wanted: tuple[str, ...]
    recipes: Sequence[Recipe]

    @property
    def facts(self) -> dict[str, Fact]:
        """Facts about the requested configuration, for the ledger to rule out entries."""
        return {
            "dtype": self.model.fixed["dtype"],
            "checkpoint": self.checkpoint,
            "compile": self.compile,
            "memory_budget": 100,
            "grad_mode": "train",
            "autocast": False,
            "dynamic": False,
            **of_models((self.model, *self.others)),
        }


def head(one: Configuration, first: int, specs: Sequence[Spec], ranks: int = 0) -> str:
    """The text at the beginning: what is checked, for how long, whether compiling fits into that
    time, and notes about the model. ``first``: the number of its first cases, ``ranks`` of which
    run on ranks."""
    options, model, wanted = one.options, one.model, one.wanted
    minutes = options.minutes or MINUTES
    length = f"{minutes:g} minute{'s' * (minutes != 1)}"
    then = plural(options.cases, "case") if options.cases else length
    chosen = sum(named(name, one.only) for name in model.linears)
    of = f"{chosen} of " if chosen < len(model.linears) else ""
    sizes = f" and {len(one.others)} other sizes" if one.others else ""
    linears = f"{of}{plural(len(model.linears), 'linear')}{sizes}"
    where = f"and near it, on {len(VALUES)} kinds of data" if first > ranks else ""
    on_ranks = f"{'and ' * bool(where)}on two ranks" if ranks else ""
    lines = []
    if not options.recipes:
        lines.append(
            f"no --recipe given: testing {', '.join(wanted)}, the model as it is built, without "
            "FP8 or MX; narrowfuzz list recipes shows others"
        )
    lines += [
        f"{model.title}: {linears}; {', '.join(wanted)}, --compile {one.compile}, --checkpoint "
        f"{one.checkpoint}",
        f"first {plural(first, 'case')} of this configuration "
        f"{' '.join(filter(None, (where, on_ranks)))}; then random ones around it, on all "
        f"{len(WILD)} kinds, for {then} in all",
    ]
    if one.compile != "none":
        programs = sum(spec.compile != "none" for spec in specs)
        seconds = None if options.cases else 60 * minutes
        lines.append(_compiling(one.compile, len(model.linears), programs, seconds))
    notes = (*_notes(one), *_refused(one, specs), *_not_quantised(one, specs))
    lines += [f"note: {note}" for note in notes]
    return "\n".join(lines)


def _notes(one: Configuration) -> Iterator[str]:
    """What is unusual about the model, and what follows from that."""
    model, checkpoint = one.model, one.checkpoint
    if model.unrepeatable and checkpoint != "none":
        yield (
            f"{model.unrepeatable} computes something else when it is called again with the "
            "same inputs, as a block does that writes into a cache of keys and values "
            "(transformers: use_cache=False), or that reads a buffer which it changes: a "
            "checkpoint of it alone would not compute what its forward did, so the model is "
            "checkpointed as a whole"
        )
    elif checkpoint != "none":
        blocks = few([name.removeprefix("model.") for name in model.regions], _NAMED)
        what = f"{blocks}, one by one" if blocks else "the model as a whole"
        yield f"--checkpoint {checkpoint} recomputes {what}"
    if model.cut:
        yield (
            "its forward sets requires_grad of its input, which torch allows for leaves alone: it "
            "is called with an input that needs no gradient, and the input's gradient is not judged"
        )
    again = frozenset(model.changing_again if checkpoint != "none" else ())
    if model.changing:
        names = few([name.removeprefix("model.") for name in model.changing], _NAMED)
        yield (
            f"each forward changes its buffers {names}: every run begins with what it is "
            "built with, and those that a state_dict holds are compared at the end"
            + _changed_again(model.changing, again)
        )
    if model.changing_parameters:
        names = few([n.removeprefix("model.") for n in model.changing_parameters], _NAMED)
        yield (
            f"each forward changes its parameters {names} by itself: every run begins with the "
            "values of its case" + _changed_again(model.changing_parameters, again)
        )
    if idle := [name for name in model.only_read if named(name, one.only)]:
        names = few([name.removeprefix("model.") for name in idle], _NAMED)
        converts = any(recipe.package for recipe in one.recipes)
        yield (
            f"{names}: never called, other functions read the parameters; "
            + "what these compute is checked call by call, not as linears" * (not converts)
            + "a conversion that replaces such a linear by one of its own does not quantise these "
            "products" * converts
        )
    if model.unreached:
        names = few(model.unreached, _NAMED)
        yield (
            f"no gradient reaches {names} in one call with what it is built with: nothing "
            "that it returns depends on that, or only through detach() or .data"
        )
    if any(BY_NAME[arm].sharded for arm in select_arms(one.options.arms)):
        if why := why_alone(model):
            yield f"no ranks train it, as {why}"
        elif why := why_not_fsdp(model):
            yield f"ranks train it by DDP and not by FSDP, as {why}"


def _changed_again(changing: Sequence[str], again: Collection[str]) -> str:
    """Which of the buffers or parameters that a forward changes a recompute changes again."""
    those = [name for name in changing if name in again]
    which = few([name.removeprefix("model.") for name in those], _NAMED)
    which = "them" if len(those) == len(changing) else which
    return f"; a checkpoint's recompute changes {which} again" if those else ""


def _by_backend(
    one: Configuration, specs: Sequence[Spec], note: Callable[[Recipe, Spec], str]
) -> Iterator[str]:
    """What ``note`` says about each recipe, after its name; "" is nothing. A recipe's backends are
    named if it does not say the same about all of them."""
    found: dict[tuple[str, str], set[str]] = {}
    backends: dict[str, set[str]] = {}
    for spec in specs:
        recipe = next(recipe for recipe in one.recipes if recipe.name == spec.recipe)
        if (backend := recipe.backend(spec)) in backends.setdefault(spec.recipe, set()):
            continue
        backends[spec.recipe].add(backend)
        if words := note(recipe, spec):
            found.setdefault((spec.recipe, words), set()).add(backend)
    for (name, words), those in found.items():
        which = f" with backend {' or '.join(sorted(those))}" if those < backends[name] else ""
        yield f"{name.partition(FILTERED)[0]}{which} {words}"


def _refused(one: Configuration, specs: Sequence[Spec]) -> Iterator[str]:
    """Which linears the recipes convert and refuse by their sizes, and how to leave these out."""
    linears = cache(lambda: _linears(one.model, specs[0]))  # not built for nothing
    return _by_backend(one, specs, lambda recipe, spec: _refusal(one, recipe, spec, linears))


def _refusal(
    one: Configuration, recipe: Recipe, spec: Spec, linears: Callable[[], Mapping[str, Any]]
) -> str:
    """What the recipe refuses in this Spec, each linear with the reason, and the filters that leave
    it out; "" if it refuses nothing that it converts."""
    device = torch_name(one.options.device or "cpu")
    refused: dict[str, str] = {}
    of_rows: set[str] = set()
    for product in one.model.products:
        sizes = {"m": product.rows, "batch": 0, "k": product.k, "n": product.n}
        own = msgspec.structs.replace(spec, **sizes)
        why = recipe.refusal(own, device)
        if why and named(product.layer, one.only):
            refused.setdefault(product.layer, why)
            if not recipe.refusal(msgspec.structs.replace(own, m=_PLAIN_TOKENS), device):
                of_rows.add(product.layer.removeprefix("model."))
    modules = linears() if refused else {}
    chosen = [name for name in modules if named(name, one.only)]
    converted = {name for name in chosen if recipe.convertible(modules[name], name, spec)}
    refused = {n.removeprefix("model."): why for n, why in refused.items() if n in converted}
    if not refused:
        return ""
    # the other linears that are called and selected by the filter, converted or not
    taken = {p.layer.removeprefix("model.") for p in one.model.products if named(p.layer, one.only)}
    globs = _globs([*refused], sorted(taken - refused.keys()))
    filters = " ".join(f"--filter '!{glob}'" for glob in globs)
    return (
        f"refuses {len(refused)} of {plural(len(converted), 'linear')} that it converts: "
        f"{few([f'{name} ({why})' for name, why in refused.items()], _NAMED)}"
        + f"; with {_PLAIN_TOKENS} tokens in the example it takes {_all_or(of_rows, refused)}"
        * bool(of_rows & refused.keys())
        + f"; {filters} leaves {'it' if len(refused) == 1 else 'them'} as built"
        * (len(refused) < len(converted))
    )


def _all_or(some: Collection[str], every: Collection[str]) -> str:
    """Words for those of ``every`` that are among ``some``."""
    both = [name for name in every if name in some]
    if len(both) < len(every):
        return few(both, _NAMED)
    return "it" if len(every) == 1 else "them"


def _not_quantised(one: Configuration, specs: Sequence[Spec]) -> Iterator[str]:
    """Which linears with a forward of their own the recipes convert without effect: the forward
    takes the parameters and multiplies them by itself, as ``x @ self.weight.T``."""

    def note(recipe: Recipe, spec: Spec) -> str:
        names = _untapped(one.model, recipe, spec) if one.model.own_forwards else ()
        layers = few([name.removeprefix("model.") for name in names], _NAMED)
        text = (
            f"converts {layers}, but with the example input it quantises no product of their own "
            "forward"
        )
        return text * bool(names)

    return _by_backend(one, specs, note)


def _untapped(model: Model, recipe: Recipe, spec: Spec) -> tuple[str, ...]:
    """Names of the linears with a forward of their own that this recipe converts, and whose calls
    in one forward multiply, and quantise nothing of that; () if the recipe's products cannot be
    observed, or if the converted model raises, which its cases report."""
    if recipe.converted is None or recipe.tap is no_tap:
        return ()
    import torch

    from narrowfuzz.own_models.affected import Products
    from narrowfuzz.play.dtypes import DTYPES
    from narrowfuzz.play.kernels import eagerly

    called: dict[str, int] = {}
    multiplied: set[str] = set()
    running: list[str] = []

    def took(*operands: Any) -> None:
        for name in running:
            called[name] += 1

    def begin(name: str) -> None:
        called.setdefault(name, 0)
        running.append(name)

    def end(*_: Any) -> None:
        running.pop()

    with torch.random.fork_rng(devices=()), eagerly():
        try:
            built = model.build(spec, dtype=DTYPES[spec.dtype], device="cpu")
            built = recipe.convert(built, spec)
            modules = dict(built.named_modules())
            for name in model.own_forwards:
                layer = modules.get(name)
                if layer is not None and recipe.converted(layer):
                    layer.register_forward_pre_hook(lambda *_, name=name: begin(name))
                    layer.register_forward_hook(end)
            with recipe.tap(Emit(took)), Products(lambda: multiplied.update(running)):
                built.called(built.given[built.driven])
        except Exception:  # noqa: BLE001 - cases run it, too, and report what it raises
            return ()
    return tuple(n for n in model.own_forwards if called.get(n) == 0 and n in multiplied)


def _linears(model: Model, spec: Spec) -> dict[str, Any]:
    """Name -> linear of a user's model as it is built, before a conversion."""
    import torch

    from narrowfuzz.play.dtypes import DTYPES

    with torch.random.fork_rng(devices=()):
        built = model.build(spec, dtype=DTYPES[spec.dtype], device="cpu")
    modules = dict(built.named_modules())
    return {name: modules[name] for name in model.linears}


def _globs(names: Sequence[str], others: Sequence[str]) -> Iterator[str]:
    """A few globs, as ``recipe.named`` reads them, that match these names of linears in the user's
    model and none of the ``others``."""
    rest = list(names)
    while rest:
        fitting = [glob for glob in _globs_of(rest[0]) if not _matched(others, glob)]
        glob = max(fitting, key=lambda glob: len(_matched(rest, glob)), default=rest[0])
        yield glob
        matched = _matched(rest, glob)
        rest = [name for name in rest[1:] if name not in matched]


def _matched(names: Sequence[str], glob: str) -> list[str]:
    return [name for name in names if named(f"model.{name}", (glob,))]


def _globs_of(name: str) -> Iterator[str]:
    """Globs for this name: itself, its last part, its other ends, its beginnings, and what is
    inside of one part. Numbers by themselves are no names."""
    parts = name.split(".")
    yield name
    yield from parts[-1:] * (not parts[-1].isdigit())
    yield from (f"*.{'.'.join(parts[-n:])}" for n in range(2, len(parts)))
    yield from (f"{'.'.join(parts[:n])}.*" for n in range(1, len(parts)))
    yield from (f"*.{part}.*" for part in parts[1:-1] if not part.isdigit())


def _compiling(compiler: str, linears: int, programs: int, seconds: float | None) -> str:
    """A sentence on how long compiling takes, and whether there is time for it."""
    starts, more = _COMPILES["inductor" if compiler == "inductor" else "aot_eager"]
    each = starts + more * linears
    every = ", each" * (programs != 1)
    text = f"compiled {plural(programs, 'time')}{every} in about {each:.0f} seconds"
    if seconds is None or each < seconds * _SHARE:
        return text
    least = math.ceil(each / _SHARE / 60)
    return f"{text}: that may not fit into {seconds / 60:g} minutes, give it --minutes {least}"
