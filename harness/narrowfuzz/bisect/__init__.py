"""Finds the release, or the commit, since which a script shows its divergence."""
