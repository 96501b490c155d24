"""The layout of a single process, without ranks."""

from __future__ import annotations

from narrowfuzz.case.layout.layout import Layout
from narrowfuzz.case.sharding import UNSHARDED

ONE = Layout(
    "one process",
    lambda sharding: sharding == UNSHARDED,
    lambda model: True,
    lambda spec: spec,
    lambda spec, shards: iter(()),
    lambda sharding: iter(()),
    lambda spec, linears: None,
    scales="grad_scaler",
    clips=("norm", "norm_inf", "value"),
)
