"""Delayed scaling as a pure fold: rule O14, and who is to blame where two runs differ.

``fold.expected`` takes one arm's run event by event. An event turns a frozen ``State`` into the
next; the same event, evaluated without a deviation of the ledger, tells what that deviation did.
"""
