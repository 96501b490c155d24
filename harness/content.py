"""Where recipes/, properties/ and reports/ are: beside the package in a checkout, inside it in a
wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def content_dir(name: str) -> Path:
    """The folder of one kind of content. Raises ValueError if this installation lacks it."""
    for candidate in (_PACKAGE.parent / name, _PACKAGE / "_content" / name):
        if candidate.is_dir() and (name != "recipes" or any(candidate.glob("*.py"))):
            return candidate
    raise ValueError(f"this installation has no {name}/ folder: reinstall narrowfuzz")


def in_checkout() -> bool:
    """True if the package runs from a source tree."""
    return (_PACKAGE.parent / "pyproject.toml").is_file()
