"""How much is found: faults hunted and controls run, and which passes could not have failed."""
