"""Arms: the ways to run a case. Each leaves a Trace; none of them judges."""
