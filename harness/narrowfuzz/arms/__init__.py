"""Arms: the ways to run a case. Each run returns a Trace; judging it is the task of the rules."""
