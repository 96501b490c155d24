"""What must hold of every case: `table` has all rules, the files beside it judge by them."""

from narrowfuzz.rules.table import BY_NAME, RULES, rules_of

__all__ = ["BY_NAME", "RULES", "rules_of"]
