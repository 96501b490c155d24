"""Formats that a CI reads: findings as lines of JSON, JUnit's XML, SARIF."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from xml.etree.ElementTree import Element, ElementTree, SubElement, indent

from narrowfuzz import __version__
from narrowfuzz.ledger.severity import Severity
from narrowfuzz.report.accepted import Accepted
from narrowfuzz.report.glossary import explained
from narrowfuzz.report.judged import Combination
from narrowfuzz.report.outcome import Ended
from narrowfuzz.rules.texts import title_of
from narrowfuzz.triage.finding import Finding, configuration_of, known_words

#: Version of the fields of ``findings.jsonl``; it is raised when a field changes its meaning, not
#: when one is added.
SCHEMA = 1
_LEVELS: dict[Severity, str] = {"high": "error", "medium": "warning", "low": "note"}


def write_formats(ended: Ended) -> None:
    """Write ``findings.jsonl``, ``junit.xml`` and ``findings.sarif`` to the run's folder."""
    store, accepted = ended.store, ended.accepted
    found = store.findings()
    rows = [row(finding, "new", accepted) for finding in found]
    rows += [row(finding, "suspected", accepted) for finding in store.suspected()]
    lines = (json.dumps(one, sort_keys=True) for one in rows)
    (store.out / "findings.jsonl").write_text("".join(f"{line}\n" for line in lines))
    junit = ElementTree(_junit(found, ended))
    indent(junit)
    junit.write(store.out / "junit.xml", encoding="utf-8", xml_declaration=True)
    (store.out / "findings.sarif").write_text(json.dumps(_sarif(found, accepted), indent=2) + "\n")


def row(finding: Finding, status: str, accepted: Accepted) -> dict[str, Any]:
    """A finding as one line of ``findings.jsonl``: ``status`` is new or suspected, ``counts`` is
    true if it makes the run fail, paths are relative to the run's folder."""
    spec, why = finding.minimal.spec, accepted.why(finding)
    return {
        "schema": SCHEMA,
        "id": finding.id,
        "fingerprint": finding.fingerprint,
        "status": status,
        "counts": status == "new" and not why,
        "accepted": why,
        "why_suspected": finding.why_suspected,
        "severity": finding.severity,
        "why_severity": finding.why_severity,
        "known_issue": finding.known_issue or "",
        "rule": finding.rule,
        "strength": finding.strength,
        "sentence": finding.sentence,
        "recipe": finding.recipe,
        "backend": spec.backend,
        "arm": finding.arm,
        "model": spec.model,
        "device": finding.device,
        "needs": finding.needs,
        "needless": finding.needless,
        "first_bad": finding.first_bad,
        "avoided": finding.avoided,
        "repeats": finding.flake,
        "case": f"findings/{finding.id}/case.json",
        "script": f"findings/{finding.id}/repro.py",
        "versions": finding.environment.get("versions", {}),
    }


def _junit(found: Sequence[Finding], ended: Ended) -> Element:
    """One test per recipe, arm and model: it fails with the findings of that combination, and is
    skipped if the run has never judged it."""
    share = ended.share
    failing: dict[Combination, list[Finding]] = {}
    for finding in ended.accepted.counting(found):
        place = finding.recipe, finding.arm, finding.minimal.spec.model
        failing.setdefault(place, []).append(finding)
    never = {*share.never} - failing.keys()
    places = sorted({*share.met, *share.never, *failing})
    suite = Element(
        "testsuite",
        name="narrowfuzz",
        tests=str(len(places)),
        failures=str(len(failing)),
        skipped=str(len(never)),
        errors="0",
        time=f"{ended.tally.seconds:.1f}",
    )
    for place in places:
        recipe, arm, model = place
        test = SubElement(suite, "testcase", classname=recipe, name=f"{arm} / {model}")
        for finding in failing.get(place, ()):
            failure = SubElement(test, "failure", message=finding.sentence, type=finding.rule)
            known = f"{known_words(finding.known_issue)}\n" if finding.known_issue else ""
            failure.text = (
                f"{known}severity {finding.severity}, {configuration_of(finding)}\n"
                f"findings/{finding.id}/repro.py reproduces it\n"
                f"found by: narrowfuzz rule {finding.rule}"
            )
        if place in never:
            SubElement(test, "skipped", message="not checked in this run")
    return suite


def _sarif(found: Sequence[Finding], accepted: Accepted) -> dict[str, Any]:
    """SARIF 2.1.0, which code hosts show beside a change; each result is located at its script."""
    rules = sorted({finding.rule for finding in found})
    return {
        "version": "2.1.0",
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "narrowfuzz",
                        "version": __version__,
                        "rules": [
                            {
                                "id": name,
                                "shortDescription": {"text": title_of(name)},
                                "fullDescription": {"text": explained(name)},
                            }
                            for name in rules
                        ],
                    }
                },
                "results": [_result(finding, accepted) for finding in found],
            }
        ],
    }


def _result(finding: Finding, accepted: Accepted) -> dict[str, Any]:
    script = {"uri": f"findings/{finding.id}/repro.py"}
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "level": _LEVELS[finding.severity],
        "message": {"text": f"{finding.sentence} ({configuration_of(finding)})"},
        "partialFingerprints": {"narrowfuzz/v1": finding.fingerprint},
        "locations": [
            {"physicalLocation": {"artifactLocation": script, "region": {"startLine": 1}}}
        ],
    }
    if why := accepted.why(finding):
        result["suppressions"] = [{"kind": "external", "justification": why}]
    return result
