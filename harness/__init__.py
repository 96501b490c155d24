"""narrowfuzz: find numerical bugs of narrow-precision training before a long run dies of them.

The data's way: strategy -> case -> arms -> traces -> oracles -> finding -> triage -> report.
Importing this package imports neither torch nor numpy; ``Fault`` is all a fault file needs.
"""

from harness.faults.fault import Fault

__version__ = "0.1.0"

__all__ = ["Fault", "__version__"]
