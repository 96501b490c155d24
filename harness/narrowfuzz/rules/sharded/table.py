"""The rules of a sharded case, in the order they are judged."""

from __future__ import annotations

from dataclasses import replace

from narrowfuzz.rules.gemm import check_bias_gradient, check_gemm_grads, check_gemm_output
from narrowfuzz.rules.rule import Rule
from narrowfuzz.rules.sharded.census import check_quantised
from narrowfuzz.rules.sharded.context import check_context
from narrowfuzz.rules.sharded.contract import check_contract
from narrowfuzz.rules.sharded.operands import check_operands
from narrowfuzz.rules.sharded.products import check_products
from narrowfuzz.rules.sharded.results import (
    check_agreement,
    check_compiled,
    check_equal,
    check_gradients,
    check_norm,
    check_precomputed,
    check_processes,
    check_stages,
)
from narrowfuzz.rules.sharded.resumed import check_resumed

_START = frozenset({"contract"})
_SEEN = _START | {"S7", "S3"}
_MULTIPLIED = _SEEN | {"O5", "O15", "O16", "S5"}
_WHOLE = _MULTIPLIED | {"S1"}

_CONTRACT = Rule(
    "contract", "contract on ranks", "exact", "C", "one process runs it", check_contract,
    scope="case", reads=("run",), of="sharded",
)  # fmt: skip
OF_PIPELINE: tuple[Rule, ...] = (
    replace(_CONTRACT, of="pipeline"),
    Rule(
        "S12", "stages of a pipeline", "exact", "C", "always", check_stages, _START, scope="case",
        of="pipeline",
    ),
    Rule(
        "S9", "compiled on ranks", "exact", "C", "graphs are traced", check_compiled,
        _START | {"S12"}, scope="case", of="pipeline",
    ),
)  # fmt: skip
OF_CONTEXT: tuple[Rule, ...] = (
    replace(_CONTRACT, of="context"),
    Rule(
        "S1", "one process's bits", "exact", "C", "one rank", check_equal, _START, scope="case",
        of="context",
    ),
    Rule(
        "O9", "error-ratio", "ratio", "C", "one process and float64 are finite", check_context,
        _START, scope="case", of="context",
    ),
    Rule(
        "S4", "ranks agree", "exact", "C", "several ranks hold it in full", check_agreement,
        _START | {"O9"}, scope="case", of="context",
    ),
)  # fmt: skip
OF_SHARDED: tuple[Rule, ...] = (
    _CONTRACT,
    Rule(
        "S7", "quantised on ranks", "exact", "A", "one process quantises", check_quantised,
        _START, scope="case", reads=("conversion",), of="sharded",
    ),
    Rule(
        "S3", "operands of the whole", "exact", "A", "the same is quantised", check_operands,
        _START, scope="case", reads=("operands", "scales"), of="sharded",
    ),
    Rule(
        "O5", "gemm-bound, output", "bound", "A", "a rank's own sum", check_gemm_output, _SEEN,
        of="sharded",
    ),
    Rule(
        "O15", "gemm-bound, gradients", "bound", "A", "a rank's own sum", check_gemm_grads, _SEEN,
        of="sharded",
    ),
    Rule(
        "O16", "bias gradient", "bound", "C", "no sum can overflow", check_bias_gradient, _SEEN,
        reads=("bias gradient",), of="sharded",
    ),
    Rule(
        "S5", "product over ranks", "bound", "A", "ranks share a linear", check_products, _SEEN,
        scope="case", of="sharded",
    ),
    Rule(
        "S1", "one process's bits", "exact", "C", "no sum is cut", check_equal, _MULTIPLIED,
        scope="case", of="sharded",
    ),
    Rule(
        "S2", "reduced gradient", "bound", "C", "one backward a step", check_gradients, _WHOLE,
        scope="case", of="sharded",
    ),
    Rule(
        "S8", "precomputed scales", "exact", "C", "scales are precomputed", check_precomputed,
        _WHOLE, reruns=True, scope="case", reads=("results again",), of="sharded",
    ),
    Rule(
        "S9", "compiled on ranks", "exact", "C", "graphs are traced", check_compiled, _WHOLE,
        scope="case", of="sharded",
    ),
    Rule(
        "S10", "processes on ranks", "exact", "C", "processes ran it", check_processes, _WHOLE,
        scope="case", of="sharded",
    ),
    Rule(
        "S11", "saved and resumed", "exact", "C", "it is saved and loaded", check_resumed, _WHOLE,
        scope="case", of="sharded",
    ),
    Rule(
        "S4", "ranks agree", "exact", "C", "several ranks hold it in full", check_agreement,
        _WHOLE | {"S2"}, scope="case", of="sharded",
    ),
    Rule(
        "S6", "norm of the gradients", "bound", "C", "no square over- or underflows", check_norm,
        _WHOLE | {"S2", "S4"}, scope="case", of="sharded",
    ),
)  # fmt: skip
