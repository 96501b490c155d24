"""Addresses and expectations: one text each, read back as what was written."""

from __future__ import annotations

import math
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from narrowfuzz.trace.address import At, AtPhase, What, parse
from narrowfuzz.trace.expect import (
    FINITE,
    Expect,
    Is,
    OneOf,
    Present,
    Same,
    State,
    Within,
    bits,
    read,
)
from narrowfuzz.trace.meaning import located
from narrowfuzz.trace.verdict import Verdict

NAMES = st.from_regex(r"[A-Za-z_0-9]+(\.[A-Za-z_0-9]+)*", fullmatch=True)
PLACES = st.builds(
    At,
    what=st.sampled_from(get_args(What)),
    run=st.just("") | st.from_regex(r"[a-z_+]+( [a-z]+)*", fullmatch=True),
    rank=st.integers(0, 9),
    event=st.integers(-1, 20),
    of=st.integers(-1, 9),
    layer=st.just("") | NAMES,
    phase=st.sampled_from(get_args(AtPhase)),
    name=st.just("") | NAMES,
    side=st.sampled_from(["", "a", "b"]),
    index=st.lists(st.integers(0, 4096), max_size=4).map(tuple),
)


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(PLACES, st.integers(0, 5))
def test_an_address_reads_what_it_prints(at: At, call: int) -> None:
    at = msgspec.structs.replace(at, call=call if at.layer else 0)
    assert parse(str(at)) == at
    assert msgspec.json.decode(msgspec.json.encode(at), type=At) == at


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (
            At(what="codes", layer="q", name="output", side="a", index=(3, 4), phase="recompute"),
            "the quantised copy of the input at [3, 4], in q, in recompute",
        ),
        (
            At(what="amax", name="grad_weight", side="b"),
            "the amax of the input, as quantised for the weight gradient",
        ),
        (At(name="a.weight.grad", index=(0,)), "the gradient of a.weight at [0]"),
        (
            At(what="product", name="grad_input", run="inductor", rank=1, index=(0, 1)),
            "inductor: the input gradient at [0, 1], on rank 1",
        ),
        (At(name="output@1", of=1, event=3), "the output 1, in event 3, in the forward of y1"),
        (At(what="function", name="x"), "function x"),
    ],
)
def test_an_address_is_words_for_a_reader(at: At, text: str) -> None:
    assert located(at) == text


def test_what_is_expected_elsewhere_is_said_with_its_place() -> None:
    of = At(name="output", rank=1, index=(0,))
    there = Same(At(name="output", index=(0,)), "3")
    verdict = Verdict("X", "sharded", "output", "diverged", "differs between ranks", of, "2", there)
    assert verdict.sentence().endswith("expected 3 as the output at [0], got 2")


@pytest.mark.parametrize(
    "text", ["", "somewhere", "codes output/c[0]", "event -2, result y", "result output[0,1]"]
)
def test_what_is_no_address_is_refused_with_one_that_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no address: write it as result output\[0, 3\]"):
        parse(text)


@given(st.floats())
def test_numbers_are_kept_exactly(x: float) -> None:
    y = read(bits(x))
    assert (math.isnan(x) and math.isnan(y)) or (
        x == y and math.copysign(1, x) == math.copysign(1, y)
    )


@pytest.mark.parametrize(
    ("expect", "text"),
    [
        (Is(bits(127), byte=True), "byte 127"),
        (Is(bits(math.nan)), "nan"),
        (Within(bits(0.5), bits(1)), "between 0.5 and 1"),
        (FINITE, "a number"),
        (OneOf((Within(bits(0), bits(0)), Within(bits(0.5), bits(1)))), "0 or between 0.5 and 1"),
        (State(bits(2), (bits(0), bits(1.5))), "scale 2 window [0, 1.5]"),
        (Present(("x.grad",)), "a gradient for every parameter that requires one"),
    ],
)
def test_an_expectation_is_data_and_a_text(expect: Expect, text: str) -> None:
    assert str(expect) == text
    assert msgspec.json.decode(msgspec.json.encode(expect), type=Expect) == expect


def test_a_sentence_is_made_of_address_and_expectation() -> None:
    at = At(what="codes", layer="layers.0.wq", name="output", side="a", index=(3, 4))
    verdict = Verdict("O2", "eager", "output", "diverged", "rounded code", at, "2", Is(bits(3)))
    assert verdict.sentence() == (
        "layers.0.wq: the input is rounded wrongly when it is quantised at [3, 4]: expected "
        "3, got 2"
    )


@pytest.mark.parametrize(
    ("raw", "type"),
    [
        (b'{"what": "nowhere"}', At),
        (b'{"place": 3}', At),
        (b'{"type": "hopes"}', Expect),
        (b'{"type": "is", "value": "0x1p+0", "why": 1}', Expect),
    ],
)
def test_an_unknown_place_or_expectation_is_refused(raw: bytes, type: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(raw, type=type)
