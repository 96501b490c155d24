"""O2 of a library's layers: the scale of a tensor is the tensor's own."""

from __future__ import annotations

import numpy as np
import pytest
from narrowfuzz.case.events import Close, Forward, Open
from narrowfuzz.case.spec import Case, DataSpec, Spec
from narrowfuzz.rules.evidence import Evidence, OwnLayers
from narrowfuzz.rules.library.casts import check_casts
from narrowfuzz.trace.snapshots import CastSeen, ExecutionPoint, Moment
from narrowfuzz.trace.trace import Trace

AMAX = np.float32(3.0)  # bf16 has the neighbours 2.984375 and 3.015625


def said(by: float, dtype: str, *deviations: str) -> tuple[str, str]:
    """Status and symptom of a tensor, whose largest magnitude is AMAX, with a scale by another."""
    codes = np.zeros((1, 1), np.uint8)
    scale = np.float32(448) / np.float32(by)
    at = ExecutionPoint("forward", 0, 0)
    cast = CastSeen(at, None, "e4m3", scale, AMAX, codes)
    spec = Spec(
        recipe="te.current", model="library_linear", dtype=dtype,
        events=(Open(), Forward(), Close()),
    )  # fmt: skip
    trace = Trace("eager", {}, moments=(Moment(1, (), (cast,), (), {}, {}),))
    evidence = Evidence(
        case=Case(spec=spec, data=DataSpec()),
        traces={"eager": trace},
        deviations={name: f"entry of {name}" for name in deviations},
        library=OwnLayers("current", lambda settings: None),
    )
    (verdict,) = check_casts(evidence)
    return verdict.status, verdict.symptom


def test_the_tensors_own_scale_is_right() -> None:
    assert said(3.0, "bf16") == said(3.0, "bf16", "amax_before_rounding") == ("ok", "")


@pytest.mark.parametrize("by", [2.9925, 2.9999, 3.0001, 3.0075])
def test_a_scale_from_before_rounding_is_wrong_or_known(by: float) -> None:
    assert said(by, "bf16") == ("diverged", "e4m3 scale")
    assert said(by, "bf16", "amax_before_rounding") == ("known", "")


@pytest.mark.parametrize(
    ("by", "dtype"), [(2.991, "bf16"), (3.009, "bf16"), (6.0, "bf16"), (3.002, "fp16")]
)
def test_no_larger_difference_is_known(by: float, dtype: str) -> None:
    assert said(by, dtype, "amax_before_rounding") == ("diverged", "e4m3 scale")
