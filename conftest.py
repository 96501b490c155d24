"""Loads the plugin where narrowfuzz runs from a checkout that is not installed."""

from __future__ import annotations

import importlib.metadata

if not importlib.metadata.entry_points(group="pytest11", name="narrowfuzz"):
    pytest_plugins = ["narrowfuzz.plugin"]
