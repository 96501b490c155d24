"""Rules of cases that run on several ranks: what sharding may change, and what it may not."""
