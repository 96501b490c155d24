"""The arguments that a user's ``build`` may be called with, as its annotations declare them.

``def build(layers: Literal[1, 2] = 1, tokens: Annotated[int, range(16, 65)] = 32)`` has eight
combinations of one or two layers and 16, 32, 40 or 64 tokens.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

#: Largest number of combinations that are judged.
MOST = 12
#: The arguments that differ from the first value of their parameter, as (name, value).
Dims = tuple[tuple[str, Any], ...]


def choices(build: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """Parameter -> its values, the default first if it has one.

    A parameter with any other annotation keeps its default. Raises ValueError for a parameter with
    neither values nor a default; the message continues a sentence that begins with the name of
    ``build``.
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
                f"needs {name}: give it a default, or values by Literal[64, 128] or "
                "Annotated[int, range(16, 65)]"
            )
        if values:
            found[name] = tuple(dict.fromkeys(values))
    return found


def _values(hint: Any) -> tuple[Any, ...]:
    """The values of a Literal; the first, middle and last of a range; () for other annotations."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    spans = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    for span in spans:
        if isinstance(span, range) and len(span):
            return span[0], span[len(span) // 2], span[-1]
    return ()


def combinations(values: Mapping[str, tuple[Any, ...]]) -> Iterator[Dims]:
    """The first ``MOST`` combinations, ordered by how many parameters differ from their first
    values: none, one, several."""
    names, every = list(values), [tuple(enumerate(each)) for each in values.values()]
    ordered = sorted(itertools.product(*every), key=lambda one: sum(i > 0 for i, _ in one))
    for one in ordered[:MOST]:
        yield tuple((name, v) for name, (i, v) in zip(names, one, strict=True) if i)


def size(values: Mapping[str, tuple[Any, ...]], dims: Dims) -> float:
    """The product of a combination's numeric arguments, by which models are ordered by size."""
    product = 1.0
    for value in ({name: each[0] for name, each in values.items()} | dict(dims)).values():
        product *= value if isinstance(value, int | float) and value > 0 else 1
    return product
