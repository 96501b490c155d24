"""One experiment: a Spec, its events, its layout over ranks and its data. Needs no torch."""
