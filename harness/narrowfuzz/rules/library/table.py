"""The rules of a library's own layers, in the order they are judged. Names are shared with the
rules of converted models where the promise is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from narrowfuzz.rules.library.casts import check_casts
from narrowfuzz.rules.library.contract import check_balance, check_contract
from narrowfuzz.rules.library.operands import check_operands
from narrowfuzz.rules.library.own_backward import check_own_backward
from narrowfuzz.rules.library.precision import check_precision
from narrowfuzz.rules.library.ranks import check_alone, check_shared
from narrowfuzz.rules.library.recompute import check_recompute
from narrowfuzz.rules.library.twins import check_company, check_reload, check_twin
from narrowfuzz.rules.rule import Reads, Rule
from narrowfuzz.rules.state.machine import check_machine

_START = frozenset({"contract"})
#: What a recompute and a balanced end do not owe to the state machine.
_RUN = _START | {"O2", "O3", "O20"}
_SEEN = _RUN | {"O14"}


def _rule(
    name: str,
    title: str,
    level: Any,
    precondition: str,
    check: Any,
    upstream: frozenset[str],
    *reads: Reads,
) -> Rule:
    return Rule(
        name, title, "exact", level, precondition, check, upstream, scope="case",
        reads=reads or ("results", "states"), of="library",
    )  # fmt: skip


OF_LIBRARY: tuple[Rule, ...] = (
    _rule("contract", "contract", "C", "none", check_contract, frozenset(), "run"),
    _rule("O2", "cast-exact", "A", "casts are seen", check_casts, _START, "casts"),
    _rule(
        "O3", "scale-exact", "A", "operands are seen",
        check_operands, _START | {"O2"}, "operands",
    ),
    _rule("O20", "precision census", "A", "products are seen", check_precision, _START, "formats"),
    _rule(
        "O14", "state machine", "A", "state is kept",
        check_machine, _START | {"O20"}, "states", "kept state",
    ),
    _rule(
        "O13", "recompute-consistency", "A", "a product is recomputed",
        check_recompute, _RUN, "recomputed",
    ),
    _rule("O19", "balance", "A", "a step ends outside regions", check_balance, _RUN, "pending"),
    _rule("O12", "checkpoint-equal", "C", "a checkpoint", check_twin, _SEEN | {"O13"}),
    replace(
        _rule(
            "O22", "backward of its own forward", "C", "a step after one high-precision pass",
            check_own_backward, _SEEN | {"O13"},
        ),
        strength="ratio",
    ),
    # what a run sets aside for good, a later one finds
    _rule(
        "O1", "self-repeat", "C", "a dropped forward, or one in four", check_company,
        _SEEN | {"O19"}, "company",
    ),
    _rule(
        "S1", "one process's bits", "C", "ranks share nothing",
        check_alone, _SEEN | {"O19"}, "results on ranks", "states on ranks",
    ),
    _rule(
        "S13", "shared maxima", "A", "ranks run, and casts are seen",
        check_shared, _SEEN | {"O19", "S1"}, "states on ranks",
    ),
    _rule("R20", "save and reload", "C", "a reload", check_reload, _SEEN | {"O1"}),
)  # fmt: skip
