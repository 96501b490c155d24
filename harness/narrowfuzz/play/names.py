"""The names of a run's tensors and results; no other module parses them.

``output@0`` is the first output of a training, ``output`` its last; ``w1.weight.grad@7`` is the
gradient after event 7, ``input@3`` the input of the fourth forward in place of ``input``, and
``resumed:w1.weight`` a parameter at the end of a training that was saved, loaded and resumed.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

_TEXT = re.compile(r"(?:(\w+):(?!:))?([^@]*)(?:@(.*))?", re.DOTALL)


class Name(NamedTuple):
    """A name's parts; a missing part is ""."""

    #: For a training that was saved and loaded: resumed, afresh, saved, loaded.
    part: str
    #: input, output, grad_output, grad_input, <parameter>.grad, <parameter>, ...
    kind: str
    number: str

    @property
    def by_rows(self) -> bool:
        """True for an output or the gradient of an input, which have a row for each token."""
        return self.kind in ("output", "grad_input")

    @property
    def gradient_of(self) -> str:
        """The parameter whose gradient it is, "" if it is none."""
        return self._before(".grad")

    @property
    def clipped_of(self) -> str:
        """The parameter whose gradient it is once it is clipped, "" if it is none."""
        return self._before(".clipped")

    @property
    def added_of(self) -> str:
        """The parameter whose gradient it is after one of several backwards, "" if it is none."""
        return self._before(".added")

    @property
    def buffer(self) -> str:
        """The buffer whose value it is at the end, "" if it is none."""
        return self._before(".buffer")

    def _before(self, ending: str) -> str:
        return self.kind.removesuffix(ending) if self.kind.endswith(ending) else ""

    @property
    def module(self) -> str:
        """The module that has the parameter."""
        return (self.gradient_of or self.buffer or self.kind).rpartition(".")[0]


@lru_cache(4096)
def name_of(text: str) -> Name:
    """The parts of a name."""
    found = _TEXT.fullmatch(text)
    assert found is not None
    return Name(*(part or "" for part in found.groups()))
