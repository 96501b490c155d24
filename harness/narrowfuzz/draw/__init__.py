"""Hypothesis strategies for Specs, trainings, layouts and data, and the coverage of their draws.
``campaign/generator.py`` decides what a campaign draws next. Which function draws what:

* Specs of linears and models that a recipe converts: ``specs.specs``; with partial recompute
  ``specs.partly_recomputed``; their trainings ``trainings.drawn_events``
* Specs of one operator: ``operator_specs.operator_specs``
* Specs of models on ranks: ``sharded_specs.sharded_specs``
* Specs of a library's own layers, with their schedules: ``library_specs.schedules``
* data of a Spec: ``strategies.data_specs``; data that reveal a GEMM's accumulator:
  ``strategies.ladder_specs``
* cases, which are Specs with data: ``strategies.cases``; several cases of one Spec
  ``strategies.batches``; cases of a library's own layers ``strategies.schedule_cases``
* cases near a given one: ``neighbours.near``

A training and a schedule are both drawn event by event: ``walk.walk``.
"""
