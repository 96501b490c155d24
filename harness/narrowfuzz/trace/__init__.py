"""What a run leaves, how a place in it is addressed, and what a rule says about it; no torch."""
