"""What one experiment is: a Spec, its events, its layout over ranks and its data; no torch."""
