"""Planted faults: real bugs copied in small, so that every rule is shown able to fail."""
