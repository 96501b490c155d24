"""A training as a small script of events: what a stateful recipe is judged on."""
