"""Spec, DataSpec and Case: plain data that names one experiment completely.

A case is strict JSON with a schema version. Nothing in it is imported or executed; special values
are bit patterns. The invariant: the same Case makes the same program and the same tensors on any
machine.

>>> case = Case(spec=Spec(recipe="torch.fp32"), data=DataSpec())
>>> load_case(dump_case(case)) == case
True
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

SCHEMA = 1
#: A case file of a linear is under 2 kB; anything much larger is not one.
MAX_CASE_BYTES = 1 << 20

Dtype = Literal["fp32", "bf16"]
Layout = Literal["contiguous", "transposed", "strided"]
GradLayout = Literal["contiguous", "transposed", "expanded"]
Checkpoint = Literal["none", "full", "reentrant"]
Compile = Literal["none", "aot_eager", "inductor"]
Regime = Literal["lattice", "wild"]
ValueClass = Literal[
    "gaussian",
    "outlier",
    "heavy_tail",
    "zero_rows",
    "binade_edges",
    "near_max",
    "subnormal",
    "inf_nan",
]
TensorName = Literal["input", "weight", "grad_output", "bias"]

Dim = Annotated[int, Meta(ge=0, le=4096)]
Exponent = Annotated[int, Meta(ge=-60, le=60)]
HexBits = Annotated[str, Meta(pattern=r"^0x[0-9a-f]{8}\Z")]


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that shapes the program. Defaults are the simplest value of each field."""

    recipe: str
    #: Which of the recipe's code paths runs; "" is the recipe's first.
    backend: str = ""
    model: Literal["linear"] = "linear"
    #: Rows per batch entry (M), in_features (K) and out_features (N).
    m: Dim = 32
    k: Dim = 32
    n: Dim = 32
    #: 0: the input is [m, k]. Otherwise [batch, m, k].
    batch: Annotated[int, Meta(ge=0, le=64)] = 0
    bias: bool = False
    dtype: Dtype = "bf16"
    input_layout: Layout = "contiguous"
    grad_layout: GradLayout = "contiguous"
    checkpoint: Checkpoint = "none"
    compile: Compile = "none"

    @property
    def tokens(self) -> int:
        """Rows of the flattened input."""
        return self.m * (self.batch or 1)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.batch, self.m, self.k) if self.batch else (self.m, self.k)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (*self.input_shape[:-1], self.n)


class Spike(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One planted element; ``row`` and ``col`` wrap around, ``bits`` are of an fp32."""

    tensor: TensorName
    row: Annotated[int, Meta(ge=0, le=1 << 20)]
    col: Annotated[int, Meta(ge=0, le=1 << 20)]
    bits: HexBits


class DataSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Makes every tensor. All elements of a tensor are multiplied by 2^exponent of that tensor."""

    regime: Regime = "wild"
    values: ValueClass = "gaussian"
    seed: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)] = 0
    input_exponent: Exponent = 0
    weight_exponent: Exponent = 0
    grad_exponent: Exponent = 0
    spikes: Annotated[tuple[Spike, ...], Meta(max_length=16)] = ()


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One experiment: a Spec and the data it runs on."""

    spec: Spec
    data: DataSpec
    schema: int = SCHEMA

    @property
    def id(self) -> str:
        """Short hash of the canonical form."""
        return hashlib.sha256(dump_case(self)).hexdigest()[:12]


def dump_case(case: Case) -> bytes:
    """Canonical JSON: keys in sorted order, no spaces."""
    return msgspec.json.encode(case, order="sorted")


def load_case(raw: bytes) -> Case:
    """Parse a case strictly. Raises ValueError naming the field and what it must be."""
    if len(raw) > MAX_CASE_BYTES:
        raise ValueError(f"case file has {len(raw)} bytes; a case has at most {MAX_CASE_BYTES}")
    try:
        version = msgspec.json.decode(raw, type=_Versioned).schema
        if version > SCHEMA:
            raise ValueError(
                f"case has schema {version}, this one reads up to {SCHEMA}: update narrowfuzz"
            )
        if version < 1:
            raise ValueError(f"case has schema {version}: the first schema is 1")
        return msgspec.json.decode(raw, type=Case)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"not a valid case: {error}") from None
    except RecursionError:
        raise ValueError("not a valid case: nested too deeply") from None


class _Versioned(msgspec.Struct):
    schema: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]


def compile_key(spec: Spec) -> str:
    """The part of a Spec whose cases share one built (and compiled) program.

    Shapes are static here, so that is all of it.
    """
    return hashlib.sha256(msgspec.json.encode(spec, order="sorted")).hexdigest()[:12]
