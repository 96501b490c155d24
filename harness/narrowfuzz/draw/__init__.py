"""All that draws: Hypothesis strategies for Specs, trainings, layouts and data; their coverage.
What a campaign draws next, ``campaign/generator.py`` decides."""
