"""Delayed scaling as a pure fold: rule O14, and the cause of a difference between two runs.

``fold.expected`` processes one arm's run event by event. An event turns a frozen ``State`` into the
next; the same event, evaluated without a deviation of the ledger, shows what that deviation did.
"""
