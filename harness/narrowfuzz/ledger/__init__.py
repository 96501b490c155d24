"""Known issues: entries of the ledger, conditions, cures and severities.

How a known issue is matched to a divergence: ``judge.fold.fold`` asks ``Judge.known_as`` about each
first cause, which asks ``Ledger.match``. An entry matches if ``Entry.fitting`` finds a match (by a
glob of its fingerprints and its conditions, which are written in the facts of ``facts.py``), if the
entry holds for the installed versions, and if the divergence is gone under the entry's cure, if it
has one. The divergence then has the status "known" and names the entry.

The second way is a deviation: ``Ledger.deviations`` returns those of the entries whose conditions
hold for a case. The reference then imitates what the library does, so the rules expect the wrong
result, and every other divergence of that case is still found.
"""
