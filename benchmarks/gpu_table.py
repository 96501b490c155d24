"""Write the table of docs/unrun.md from reports/gpu.json: the answers of simulated and real GPUs.

    python benchmarks/gpu_table.py [FOLDER...]

adds the record of a day to reports/gpu.json and rewrites the table; ``make gpu`` does so at its
end. The day may come from another machine, and its parts may be in several folders.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_steps import STEPS, Step

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "reports" / "gpu.json"
PAGE = ROOT / "docs" / "unrun.md"
BEGIN, END = "<!-- make gpu writes from here -->\n", "<!-- to here -->\n"
#: Kind of device -> its last day: date, versions and {question: answer}.
Records = dict[str, dict[str, Any]]


def load() -> Records:
    """The recorded days: the last one of each kind of device."""
    found: Records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    return found


def keep(folders: Sequence[Path]) -> None:
    """Record the day in these folders, in place of the previous one of its kind of device, and
    write the table."""
    days = [json.loads((folder / "gpu.json").read_text()) for folder in folders]
    probe = next(
        json.loads(file.read_text()) for f in folders if (file := f / "probe.json").exists()
    )
    parts = {name: part for day in days for name, part in day["parts"].items()}
    answers = {step.question: answer_of(step, parts) for step in STEPS}
    for answer in probe["answers"]:
        answers[answer["question"]] = {True: "yes", False: "no", None: "-"}[answer["holds"]]
    simulated = days[0]["device"] == "simulated"
    kind = "simulated" if simulated else probe["device"]["gpus"][0]["name"]
    record = {"date": days[0]["date"], "minutes": sum(day["minutes"] for day in days)}
    record |= {name: probe["versions"][name] for name in ("torch", "torchao")}
    records = load() | {kind: record | {"answers": answers}}
    RECORDS.write_text(json.dumps(records, indent=2) + "\n")
    write(records)


def answer_of(step: Step, parts: dict[str, Any]) -> str:
    """The answer to the step's question: "yes", "no" or "not asked"."""
    judged = [
        parts[part.name] for part in step.parts if parts.get(part.name, {}).get("code") is not None
    ]
    if not judged:
        return "not asked"
    return "yes" if all(one["good"] for one in judged) else "no"


def table(records: Records) -> str:
    """Markdown: one row per question, one column for the simulated device and one for each real
    one."""
    real = [kind for kind in records if kind != "simulated"]
    columns = ["simulated", *(real or ["a GPU"])]
    heads = [f"{kind} ({_where(records[kind])})" if kind in records else kind for kind in columns]
    questions = dict.fromkeys(q for record in records.values() for q in record["answers"])
    lines = [f"| question | {' | '.join(heads)} |", "| --- " * (len(columns) + 1) + "|"]
    for question in questions:
        cells = [records.get(k, {}).get("answers", {}).get(question, "not yet") for k in columns]
        lines.append(f"| {question} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _where(record: dict[str, Any]) -> str:
    return f"torch {record['torch']}, torchao {record['torchao']}, {record['date']}"


def write(records: Records) -> None:
    """Put the table into the page."""
    text = PAGE.read_text()
    assert BEGIN in text and END in text, f"{PAGE} has no place for the table"
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}{table(records)}{END}{tail}")


if __name__ == "__main__":
    if sys.argv[1:]:
        keep([Path(folder) for folder in sys.argv[1:]])
    write(load())
