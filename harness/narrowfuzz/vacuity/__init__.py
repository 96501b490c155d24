"""How much a pass is worth: what was observed is falsified, and the check must notice."""
