"""The rules, in the order they are judged: what is low in the list explains what is higher."""

from __future__ import annotations

from functools import partial

from harness.oracles.census import check_census
from harness.oracles.contract import check_contract
from harness.oracles.gemm import check_gemm_grads, check_gemm_output, check_lattice, check_layer
from harness.oracles.oracle import Oracle
from harness.oracles.quantiser import check_amax, check_cast, check_scale
from harness.oracles.relations import (
    check_below_amax,
    check_flattened,
    check_locality,
    check_monotone,
    check_negation,
    check_requantise,
    check_scaling,
)
from harness.oracles.repeat import check_checkpoint, check_recompute, check_repeat
from harness.oracles.special import check_finite, check_nan_provenance

_START = frozenset({"contract", "O1"})
_QUANTISER = _START | {"O2", "O3", "O4"}
_MULTIPLY = _QUANTISER | {"O5", "O15"}
_SEEN = _MULTIPLY | {"O11", "O13"}

ORACLES: tuple[Oracle, ...] = (
    Oracle("contract", "contract", "exact", "C", "none", check_contract),
    Oracle("census", "conversion census", "exact", "C", "eager ran", check_census),
    Oracle("O1", "self-repeat", "exact", "C", "the arm ran", check_repeat),
    Oracle("O4", "amax-exact", "exact", "A", "amax is exposed", check_amax, _START),
    Oracle("O3", "scale-exact", "exact", "A", "scale is exposed", check_scale, _START | {"O4"}),
    Oracle(
        "O2", "cast-exact", "exact", "A", "codes or operands are exposed", check_cast,
        _START | {"O3", "O4"},
    ),
    Oracle("O13", "recompute-consistency", "exact", "A", "checkpoint", check_recompute, _START),
    Oracle(
        "O5", "gemm-bound, output", "bound", "A", "no partial sum can overflow",
        check_gemm_output, _START | {"O13"},
    ),
    Oracle(
        "O15", "gemm-bound, gradients", "bound", "A", "no partial sum can overflow",
        check_gemm_grads, _START | {"O13"},
    ),
    Oracle("O11", "nan-provenance", "exact", "C", "no overflow", check_nan_provenance, _MULTIPLY),
    Oracle("O10", "finite", "bound", "C", "bound 3.3 below max", check_finite, _MULTIPLY | {"O11"}),
    Oracle("O6", "layer-bound", "bound", "C", "finite operands", check_layer, _SEEN | {"O10"}),
    Oracle("O7", "lattice-equal", "exact", "C", "every sum exact", check_lattice, _SEEN | {"O6"}),
    Oracle("O12", "checkpoint-equal", "exact", "C", "eager checkpoint", check_checkpoint, _SEEN),
    Oracle(
        "R1", "scale the input", "exact", "C", "scaling is exact",
        partial(check_scaling, tensor="input"), _SEEN, reruns=True,
    ),
    Oracle(
        "R2", "scale the output gradient", "exact", "C", "scaling is exact",
        partial(check_scaling, tensor="grad_output"), _SEEN, reruns=True,
    ),
    Oracle(
        "R3", "scale the weight", "exact", "C", "scaling is exact",
        partial(check_scaling, tensor="weight"), _SEEN, reruns=True,
    ),
    Oracle("R4", "negate the input", "exact", "C", "none", check_negation, _SEEN, reruns=True),
    Oracle(
        "R12", "requantise", "exact", "A", "power-of-two scales", check_requantise, _SEEN,
        reruns=True,
    ),
    Oracle("R13", "monotone", "exact", "A", "finite granule", check_monotone, _QUANTISER),
    Oracle(
        "R14", "move below amax", "exact", "A", "finite input", check_below_amax, _SEEN,
        reruns=True,
    ),
    Oracle(
        "R15", "locality", "exact", "A", "row or block granules", check_locality, _SEEN,
        reruns=True,
    ),
    Oracle("R17", "flatten", "exact", "C", "3-D input", check_flattened, _SEEN, reruns=True),
)  # fmt: skip

BY_NAME = {oracle.name: oracle for oracle in ORACLES}
