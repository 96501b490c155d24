"""Plays a case: torch and the standard library only, so that a script can be pasted from it."""
