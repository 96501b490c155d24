"""Known issues: entries of the ledger, conditions, cures and severities."""
