"""The record ``Stateful`` of 0.1.0, which ``Recipe`` has replaced, for users' files."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from narrowfuzz.case.spec import Dtype, Spec
from narrowfuzz.recipe.carries import Carries
from narrowfuzz.recipe.recipe import Recipe, everywhere, never, nothing
from narrowfuzz.recipe.stateful import Subject


def Stateful(
    name: str,
    family: str,
    title: str,
    subject: Callable[[str], Subject],
    carries: Callable[[], Carries],
    dtypes: tuple[Dtype, ...] = ("bf16",),
    refusal: Callable[[Spec, str], str] = never,
    process: str = "",
    provide: Callable[[], None] = nothing,
    prepare: Callable[[], None] = nothing,
    unavailable: Callable[[str, str], str] = everywhere,
    backends: tuple[str, ...] = ("",),
    backend_words: Mapping[str, str] = {},
    package: str = "",
    alignment: int = 16,
    based_on: str = "",
) -> Recipe:
    """A recipe for a library's own layers."""
    return Recipe(
        name,
        family,
        title,
        backends,
        package,
        refusal=refusal,
        unavailable=unavailable,
        alignment=alignment,
        dtypes=dtypes,
        based_on=based_on,
        backend_words=backend_words,
        process=process,
        provide=provide,
        prepare=prepare,
        subject=subject,
        carries=carries,
    )
