"""Campaigns: a supervisor, its workers, and the store of findings."""
