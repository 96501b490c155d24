"""Campaigns: a supervisor, its workers, and the store of findings.

From a worker's first suspicion to a reported finding:

1. ``Worker._judge`` judges a case. ``Worker._claim`` takes each first cause that no other worker
   has claimed, and tells the supervisor so (``messages.Claimed``).
2. ``Worker._triage`` calls ``triage()``, which sees whether the case shows it again, runs the
   script of the drawn case, makes the case smaller and runs the script of that. If no script shows
   the divergence, ``triage()`` looks for nondeterminism, and then for earlier cases of the process
   on which the divergence depends.
3. ``with_first_bad`` adds where the first NaN or infinity is, and the worker sends
   ``messages.Finished`` and ``messages.Settled``.
4. ``Supervisor.take`` passes the result to the ``Store``.

If a worker's process dies or hangs, the supervisor takes its case from the ``Journal``, and
``Supervisor.record_loss`` makes a finding of it.

* claimed: one worker is to triage this fingerprint; the others leave it alone
* suspected: no script has shown the divergence, or none has been run yet
* confirmed: a script shows the divergence in a fresh process
* settled: triage has ended; the divergence is confirmed, or it is stored as suspected and may be
  claimed again on another case
"""
