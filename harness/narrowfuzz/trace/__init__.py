"""Traces (records of runs), addresses of places in them, and verdicts of rules; without torch."""
