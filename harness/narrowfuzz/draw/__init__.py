"""All that draws: Hypothesis strategies for Specs, trainings, layouts and data; their coverage."""
