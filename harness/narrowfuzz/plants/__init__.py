"""Plants: faults, which the rules must find, and legal rewrites, which they must not report."""
