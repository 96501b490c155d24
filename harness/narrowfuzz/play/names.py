"""What tensors and results of a run are called: names are taken apart here alone.

``output@0`` is the first output of a training, ``output`` its last; ``w1.weight.grad@7`` is the
gradient that event 7 left, ``input@3`` what the fourth forward is given in place of ``input``, and
``resumed:w1.weight`` a parameter after the part of a training that was saved and loaded.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

_TEXT = re.compile(r"(?:(\w+):(?!:))?([^@]*)(?:@(.*))?", re.DOTALL)


class Name(NamedTuple):
    """A name's parts; what it does not have is ""."""

    #: Of a training that was saved and loaded: resumed, afresh, saved, loaded.
    part: str
    #: input, output, grad_output, grad_input, <parameter>.grad, <parameter>, ...
    kind: str
    number: str

    @property
    def by_rows(self) -> bool:
        """An output or the gradient of an input, which have a row for each token."""
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

    def _before(self, ending: str) -> str:
        return self.kind.removesuffix(ending) if self.kind.endswith(ending) else ""

    @property
    def module(self) -> str:
        """The module whose parameter it is of."""
        return (self.gradient_of or self.kind).rpartition(".")[0]


@lru_cache(4096)
def name_of(text: str) -> Name:
    """The parts of a name."""
    found = _TEXT.fullmatch(text)
    assert found is not None
    return Name(*(part or "" for part in found.groups()))
