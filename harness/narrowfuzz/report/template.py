"""Renders the templates of HTML pages."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template


def rendered(package: str, name: str, **values: Any) -> str:
    """A package's template filled with these values, which are escaped unless they are Markup."""
    return _template(package, name).render(values)


@cache
def _template(package: str, name: str) -> Template:
    engine = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return engine.from_string(files(package).joinpath(name).read_text())
