"""A recipe as data: how each operand of a layer's three GEMMs is quantised.

Every GEMM is written Y = A @ B^T with the *contracted axis last* in both operands:

    output       A = input        [M, K]   B = weight       [N, K]
    grad_input   A = grad_output  [M, N]   B = weight^T     [K, N]
    grad_weight  A = grad_output^T[N, M]   B = input^T      [K, M]

So "one scale per row" always means "amax over the contracted axis", for every role.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from narrowfuzz.numerics.accumulator import FP32, UNKNOWN, Accumulator
from narrowfuzz.numerics.formats import CastRounding, Format, Overflow
from narrowfuzz.numerics.scales import (
    Fp32InverseScale as Fp32InverseScale,  # recipes import them from here
)
from narrowfuzz.numerics.scales import Fp32Scale as Fp32Scale
from narrowfuzz.numerics.scales import MxScale as MxScale
from narrowfuzz.numerics.scales import ScaleRule
from narrowfuzz.numerics.two_level import TwoLevelScale as TwoLevelScale

Tensor = Literal["input", "weight", "grad_output"]
Role = Literal["output", "grad_input", "grad_weight"]
ROLES: tuple[Role, ...] = ("output", "grad_input", "grad_weight")

#: role -> ((tensor of A, transposed?), (tensor of B, transposed?))
OPERANDS: dict[Role, tuple[tuple[Tensor, bool], tuple[Tensor, bool]]] = {
    "output": (("input", False), ("weight", False)),
    "grad_input": (("grad_output", False), ("weight", True)),
    "grad_weight": (("grad_output", True), ("input", True)),
}

#: One scale for the tensor, for each row, for each run of ``block`` elements along the contracted
#: axis, or for each ``block`` x ``block`` square.
Granularity = Literal["tensor", "row", "block", "tile"]


@dataclass(frozen=True)
class OperandPlan:
    """How one operand of one GEMM is quantised. ``format`` None: it stays in high precision."""

    format: Format | None = None
    granularity: Granularity = "tensor"
    block: int = 0
    scale: ScaleRule | None = None
    #: The library clamps before it casts, so finite overflow saturates whatever the cast does.
    overflow: Overflow = "saturate"
    rounding: CastRounding = "nearest"
    #: Signs of a random Hadamard transform along the contracted axis, applied before quantisation;
    #: (): none.
    hadamard: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.granularity not in (known := get_args(Granularity)):
            raise ValueError(f"granularity {self.granularity!r} is none of {', '.join(known)}")
        if (self.format is None) != (self.scale is None):
            lacking = "format" if self.format is None else "scale"
            raise ValueError(
                f"an operand needs both format and scale, and {lacking} is None: in high precision "
                "it has neither (HIGH_PRECISION)"
            )
        if (self.granularity in ("block", "tile")) != (self.block > 0):
            raise ValueError(
                f"granularity {self.granularity!r} with block={self.block}: a block or tile has a "
                "size above 0, a tensor or row has block=0"
            )

    @property
    def power_of_two(self) -> bool:
        """True if every scale is a power of two, so that scaling by itself rounds nothing."""
        return self.scale is not None and self.scale.pow2


HIGH_PRECISION = OperandPlan()

#: One rounding of the accumulator on its way out. ``out``: to the layer's dtype; ``bf16``: to bf16
#: before scales are applied, so with no subnormals and no overflow of its own.
Rounding = Literal["bf16", "out"]


@dataclass(frozen=True)
class GemmPlan:
    """Operands, accumulator and output rounding of one GEMM."""

    a: OperandPlan
    b: OperandPlan
    #: How often a scale, a dequantised operand or a product is rounded to fp32 (c of bound 3.2).
    scale_roundings: int
    rounding: tuple[Rounding, ...] = ("out",)
    #: True: the first rounding happens inside the kernel, so no compiler can fuse it away.
    kernel_rounds: bool = True
    #: The type that operands are dequantised to before they are multiplied; "": the kernel takes
    #: codes.
    dequantise_to: Literal["", "fp32", "dtype"] = ""
    #: True: the kernel multiplies unit-scaled codes and scales the result afterwards, in fp32.
    post_scale: bool = False
    #: True: the library requests its device's fast FP8 accumulation.
    fast: bool = False
    accumulator: Accumulator = FP32

    def __post_init__(self) -> None:
        if (self.a.format is None) != (self.b.format is None):
            raise ValueError(
                "a GemmPlan quantises both operands or neither (a product of weight codes alone, "
                "with an input in high precision, cannot be planned: give both HIGH_PRECISION)"
            )

    @property
    def quantised(self) -> bool:
        return self.a.format is not None

    @property
    def stochastic(self) -> bool:
        """True: running it twice may give two results."""
        return "stochastic" in (self.a.rounding, self.b.rounding)

    @property
    def transformed(self) -> bool:
        return bool(self.a.hadamard or self.b.hadamard)

    def multiplies(self, dtype: str) -> str:
        """The key of this GEMM's accumulator in a device's ``Accumulators``, in a layer of
        ``dtype``."""
        if self.a.format is None or self.dequantise_to == "dtype":
            return dtype
        if self.dequantise_to == "fp32":
            return "fp32"
        if self.a.format.bits < 8:
            return "fp4"
        block = isinstance(self.a.scale, MxScale)
        return "mxfp8" if block else "fp8 fast" if self.fast else "fp8"


@dataclass(frozen=True)
class Plan:
    """The three GEMMs of one recipe on one backend.

    ``bias``: ``separate`` rounds the GEMM's output, adds and rounds again; ``either`` allows a
    fused addition as well (which one runs is the kernel's choice, not the recipe's promise).
    """

    gemms: dict[Role, GemmPlan] = field(hash=False)
    bias: Literal["separate", "either"] = "separate"

    def __post_init__(self) -> None:
        if self.gemms.keys() != set(ROLES):
            raise ValueError(f"a plan has {', '.join(ROLES)}, not {', '.join(self.gemms) or '{}'}")

    @property
    def quantised(self) -> bool:
        return any(gemm.quantised for gemm in self.gemms.values())

    def added_by(self, accumulators: Mapping[str, Accumulator], dtype: str) -> Plan:
        """This plan with the accumulators of a device; ``UNKNOWN`` for a GEMM that the device's
        table lacks."""
        return replace(
            self,
            gemms={
                role: replace(gemm, accumulator=accumulators.get(gemm.multiplies(dtype), UNKNOWN))
                for role, gemm in self.gemms.items()
            },
        )


def unquantised(dtype: str) -> Plan:
    """The plan of a plain nn.Linear. A product of two fp32 numbers is rounded once before it is
    added; products of narrower types are exact in the fp32 accumulator."""
    gemm = GemmPlan(HIGH_PRECISION, HIGH_PRECISION, scale_roundings=int(dtype == "fp32"))
    return Plan(dict.fromkeys(ROLES, gemm), bias="either")
