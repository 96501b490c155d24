"""Imported once by the fork server, so that every worker starts with torch loaded."""

from __future__ import annotations

import torch._dynamo  # noqa: F401

from narrowfuzz.machine.environment import quieten

quieten()
