"""Writes stand-alone scripts (repro.py) that show a divergence.

``short.py`` and ``played.py`` write the two types of script; ``prove.py`` tries them, the simplest
first. The check of a script is source text made from ``verdict.expect`` and ``verdict.at``
(``short_check.py``, ``model_check.py``, ``layers_check.py``, ``ranks.py``; ``operator.py``,
``function.py`` and ``census.py`` make their own). The check of a played script calls functions of
``play/check.py`` and ``play/check_layers.py``. ``triage/forms.py`` chooses the scripts for each
kind of case; for a converted model in one process it calls ``choice.py``.
"""
