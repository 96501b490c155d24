"""The rules that every case must satisfy: `table` lists them, the other modules implement them."""

from narrowfuzz.rules.table import BY_NAME, RULES, rules_of

__all__ = ["BY_NAME", "RULES", "rules_of"]
