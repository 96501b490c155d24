"""Stand-alone scripts of findings: what they are made of, a writer for each kind, their checks."""
