"""``narrowfuzz report``: a finding as text; with ``--issue`` as an issue that can be filed with its
library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.ledger.ledger import Entry, load_entries
from narrowfuzz.ledger.severity import LARGE
from narrowfuzz.models.catalog import title_of
from narrowfuzz.report.explanation import saved_answer_lines
from narrowfuzz.report.glossary import explained
from narrowfuzz.report.lookup import OnDisk, lookup
from narrowfuzz.rules import own_functions
from narrowfuzz.trace.words import options
from narrowfuzz.triage.finding import (
    FLAKE_WORDS,
    Finding,
    effect_words,
    needed,
    needed_title,
    replay_command,
    report,
    seen_on,
)

#: The most lines of a script that an issue shows; the user attaches a longer one.
_SHOWN = 220


def report_command(target: str, *, issue: bool) -> int:
    """Print a finding; returns the exit code. Raises ValueError if the target is not a finding."""
    if not Path(target).exists() and any(entry.id == target for entry in load_entries()):
        option = " --issue" if issue else ""
        raise ValueError(
            f"{target!r} is a known issue: `narrowfuzz known {target}{option}` shows it"
        )
    found = lookup(target)
    if not isinstance(found, OnDisk):
        raise ValueError(f"{target!r} is a bare case: report wants a finding's folder or id")
    if not issue:
        print(report(found.finding, replay_of(found.finding, found.folder)))
        for line in saved_answer_lines(found.folder):
            print(f"  {line}")
        return 0
    script = (found.folder / "repro.py").read_text()
    print(issue_text(found.finding, script, saved_answer_lines(found.folder)))
    return 0


def replay_of(finding: Finding, folder: Path, files: Sequence[Path] = (), model: str = "") -> str:
    """The command that replays a finding, with these recipe files and the text that names a user's
    own model; "" names it by its title only: the user knows where its file is."""
    title = model or title_of(finding.minimal.spec.model)
    return replay_command(
        folder, options({"--recipe-file": files, "--model": [title] if title else []})
    )


def issue_text(finding: Finding, script: str, causes: Sequence[str] = ()) -> str:
    """Markdown with the sections below; empty sections are left out."""
    sections = {
        "Known issue": _known(finding),
        "What happens": _what(finding),
        "To reproduce": _script(finding, script),
        "Conditions and workarounds": "\n".join(_bulleted(causes)),
        "What was expected": _expected(finding),
        "Where it was seen": _where(finding),
        "Related known issues": _beside(finding),
    }
    body = "\n\n".join(f"### {title}\n\n{text}" for title, text in sections.items() if text)
    subject = title_of(finding.minimal.spec.model) if _of_function(finding) else finding.recipe
    return f"# {subject}: {finding.sentence}\n\n{body}\n"


def _bulleted(causes: Sequence[str]) -> Iterator[str]:
    """The lines as a Markdown list: indented lines become sub-items of the line above them."""
    for line in causes:
        yield f"  - {line.strip()}" if line.startswith(" ") else f"- {line}"


def _of_function(finding: Finding) -> bool:
    """True if the finding is about a user's autograd.Function, in which no recipe is involved."""
    return finding.rule == own_functions.NAME


def _what(finding: Finding) -> str:
    spec = finding.minimal.spec
    how = {"cpu": "on a CPU"}.get(finding.device, f"on {finding.device}")
    backend = f" ({spec.backend})" if spec.backend else ""
    ran = f"`{finding.recipe}`{backend}, run {BY_NAME[finding.arm].words} {how}"
    if _of_function(finding):
        ran = f"The function's backward, against differences of its forward in float64 {how}"
    lines = [f"{ran}, {seen_on(finding)}.", f"Seen: {finding.sentence}."]
    if float(finding.effect) >= LARGE:
        worst = effect_words(finding)
        lines.append(f"{worst[0].upper()}{worst[1:]}.")
    if needs := needed(finding):
        lines.append(f"{needed_title(finding).capitalize()}: {needs}.")
    if finding.first_bad:
        places = "\n".join(finding.first_bad)
        lines.append(f"First NaN/Inf:\n\n```\n{places}\n```\n")
    lines += [f"It does not happen with: {what}." for what in finding.avoided]
    if finding.flake != "always":
        lines.append(f"It reproduces {FLAKE_WORDS[finding.flake]}.")
    if finding.why_suspected:
        lines.append(f"**No script reproduces it yet: {finding.why_suspected}.**")
    return "\n".join(lines)


def _script(finding: Finding, script: str) -> str:
    title, count = title_of(finding.minimal.spec.model), len(script.splitlines())
    text = (
        f"It prints `{finding.script_output.strip().splitlines()[-1]}` and exits 1."
        if (finding.script_output.strip())
        else "It exits 1 while the divergence shows, 0 once it is gone."
    )
    if count > _SHOWN:
        file = f"and {title}, which is to be attached, too" if title else "alone"
        return f"The attached `repro.py` ({count} lines; torch, the library {file}). {text}"
    return f"{text}\n\n```python\n{script.rstrip()}\n```"


def _expected(finding: Finding) -> str:
    return f"The rule: {explained(finding.rule)}"


def _where(finding: Finding) -> str:
    environment = finding.environment
    versions = environment.get("versions", {})
    machine = environment.get("machine", {})
    lines = [f"- {name} {version}" for name, version in versions.items() if version != "absent"]
    lines += [
        f"- {environment.get('platform', '')}",
        f"- CPU: {', '.join(machine.get('cpu', ()))}; oneDNN {machine.get('onednn') or 'absent'}",
    ]
    if machine.get("compiler") and BY_NAME[finding.arm].compiler == "inductor":
        lines.append(f"- C++ compiler: {machine['compiler']}")
    lines += [
        f"- **{package} is no release, but a checkout or a changed copy**"
        for package in environment.get("checkouts", {})
    ]
    if not environment.get("cuda"):
        lines.append("- not tried on a GPU")
    return "\n".join(lines)


def _known(finding: Finding) -> str:
    """The known issue that the finding is, so that nobody files it twice; "" if it is none."""
    entry = next((entry for entry in load_entries() if entry.id == finding.known_issue), None)
    if entry is None:
        return ""
    return f"{_titled(entry)}; `narrowfuzz known {entry.id}` says more"


def _beside(finding: Finding) -> str:
    """Other entries of the ledger about the same recipe and rule."""
    return "\n".join(
        _titled(entry)
        for entry in load_entries()
        if entry.id != finding.known_issue
        and entry.about(finding.recipe)
        and any(glob.startswith(f"{finding.rule}--") for glob in entry.fingerprints)
    )


def _titled(entry: Entry) -> str:
    return f"- {entry.title}{''.join(f' ({link})' for link in entry.links)}"
