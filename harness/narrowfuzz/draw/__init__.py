"""Hypothesis strategies for Specs, trainings, layouts and data, and the coverage of their draws.
``campaign/generator.py`` decides what a campaign draws next."""
