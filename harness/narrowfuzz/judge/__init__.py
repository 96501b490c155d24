"""From a case to its judgement: run the arms, apply the rules, tell causes from consequences."""
