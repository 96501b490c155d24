"""Upgrades cases of schema 5 and older, where a separate record, the schedule, described the
training of a library's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from narrowfuzz.case.events import Wraps
from narrowfuzz.models.catalog import FIELDS_OF_CONVERTED, LIBRARY

if TYPE_CHECKING:
    LayerName = str
else:
    LayerName = Literal[tuple(LIBRARY.values())]

#: Up to schema 5, a checkpoint was given by whose function it was and whether it was reentrant ->
#: the value of ``Spec.checkpoint``.
_CHECKPOINTS = {
    ("library", False): "full",
    ("library", True): "reentrant",
    ("torch", False): "by_torch",
    ("torch", True): "by_torch_reentrant",
}


class _Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The training of a library's layers in a case of schema 5 or older. Fields of type Any are
    fields of today's Spec, which validates them."""

    events: Any
    layer: LayerName = "linear"
    layout: Any = "chain"
    depth: Any = 1
    checkpoint: Literal["none"] | Wraps = "none"
    checkpoint_by: Literal["library", "torch"] = "library"
    reentrant: bool = False
    quantized_init: Any = False
    settings: Any = msgspec.field(default_factory=dict)

    def today(self) -> dict[str, Any]:
        """The same as fields of today's Spec."""
        fields = {
            name: getattr(self, name)
            for name in ("events", "layout", "depth", "quantized_init", "settings")
        }
        if self.checkpoint != "none":
            kind = _CHECKPOINTS[self.checkpoint_by, self.reentrant]
            fields |= {"checkpoint": kind, "wraps": self.checkpoint}
        return {"model": f"library_{self.layer}", **fields}


class _OlderSpec(msgspec.Struct, frozen=True):
    played: _Schedule | None = msgspec.field(default=None, name="schedule")


class _OlderCase(msgspec.Struct, frozen=True):
    spec: _OlderSpec
    history: tuple[_OlderCase, ...] = ()


def upgraded(fields: dict[str, Any]) -> dict[str, Any]:
    """A case of schema 5 or older, as parsed JSON, with the fields of today's schema. Raises
    msgspec.ValidationError naming an invalid field."""
    return _upgraded(fields, msgspec.convert(fields, _OlderCase))


def _upgraded(fields: dict[str, Any], older: _OlderCase) -> dict[str, Any]:
    spec = {name: value for name, value in fields["spec"].items() if name != "schedule"}
    if older.spec.played is not None:
        # these fields had no effect beside a schedule
        mute = {*FIELDS_OF_CONVERTED, "steps", "microbatches", "grad_mode", "checkpoint", "model"}
        remaining = {name: value for name, value in spec.items() if name not in mute}
        spec = remaining | older.spec.played.today()
    earlier = zip(fields.get("history", ()), older.history, strict=True)
    history = [_upgraded(one, was) for one, was in earlier]
    remaining = {name: value for name, value in fields.items() if name != "schema"}
    return {**remaining, "spec": spec, "history": history}
