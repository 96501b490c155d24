"""What a user's ``build`` may be called with: its parameters' annotations say it.

``def build(layers: Literal[1, 2] = 1, tokens: Annotated[int, range(16, 65)] = 32)`` has eight
combinations of one or two layers and 16, 32, 40 or 64 tokens.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

#: So many combinations are judged at most.
MOST = 12
Dims = tuple[tuple[str, Any], ...]


def choices(build: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """Each parameter that is drawn, and its values: the default first, if it has one.

    A parameter of another annotation keeps its default. Raises ValueError, in words that follow
    the name of ``build``, for one that has neither values nor a default.
    """
    try:
        hints = get_type_hints(build, include_extras=True)
    except NameError as error:
        raise ValueError(f"has an annotation that does not exist: {error}") from None
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found: dict[str, tuple[Any, ...]] = {}
    for name, parameter in inspect.signature(build).parameters.items():
        if parameter.kind in open_ended:
            continue
        values = _values(hints.get(name))
        if parameter.default is not parameter.empty:
            values = (parameter.default, *values) if values else ()
        elif not values:
            raise ValueError(
                f"wants {name}: give it a default, or values by Literal[64, 128] or "
                "Annotated[int, range(16, 65)]"
            )
        if values:
            found[name] = tuple(dict.fromkeys(values))
    return found


def _values(hint: Any) -> tuple[Any, ...]:
    """Those of a Literal; of a range its first, middle and last."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    spans = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    for span in spans:
        if isinstance(span, range) and len(span):
            return span[0], span[len(span) // 2], span[-1]
    return ()


def combinations(values: Mapping[str, tuple[Any, ...]]) -> Iterator[Dims]:
    """What differs from the first of each, at most ``MOST`` of them: nothing, then one parameter,
    then several."""
    names, every = list(values), [tuple(enumerate(each)) for each in values.values()]
    ordered = sorted(itertools.product(*every), key=lambda one: sum(i > 0 for i, _ in one))
    for one in ordered[:MOST]:
        yield tuple((name, v) for name, (i, v) in zip(names, one, strict=True) if i)


def size(values: Mapping[str, tuple[Any, ...]], dims: Dims) -> float:
    """The product of the numbers among them, by which models are told smaller and larger."""
    product = 1.0
    for value in ({name: each[0] for name, each in values.items()} | dict(dims)).values():
        product *= value if isinstance(value, int | float) and value > 0 else 1
    return product
