"""Known issues: entries, the facts that limit them, what mitigates them, how severe they are."""
