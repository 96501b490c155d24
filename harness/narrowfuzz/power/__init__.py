"""Measures narrowfuzz itself: which planted faults it finds, whether controls stay silent, and
which passes of rules could not have failed."""
