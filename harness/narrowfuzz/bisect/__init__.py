"""Since which release, or which commit, a script shows what it is about."""
