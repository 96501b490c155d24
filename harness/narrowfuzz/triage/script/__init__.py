"""Stand-alone scripts (repro.py). ``prove.py`` tries them, the simplest first; ``short.py`` and
``played.py`` write them, and what each checks is source text made from ``verdict.expect`` and
``verdict.at`` (``short_check.py``, ``model_check.py``, ``layers_check.py``, ``ranks.py``;
``operator.py``, ``function.py`` and ``census.py`` make their own); a played script's check calls
functions of ``play/check.py`` and ``play/notes.py``. Which script a kind of case has
says ``triage/forms.py``; of a converted model in one process, ``choice.py``."""
