"""reports/gpu.json -> the table of docs/unrun.md: what was asked of a GPU, simulated and real.

    python benchmarks/gpu_table.py [FOLDER]

puts the day in a folder, which may come from another machine, on record, and writes the table anew;
``make gpu`` does so at its end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "reports" / "gpu.json"
PAGE = ROOT / "docs" / "unrun.md"
BEGIN, END = "<!-- make gpu writes from here -->\n", "<!-- to here -->\n"
#: Answer of one question on one kind of device: {kind: {question: answer}}.
Records = dict[str, dict[str, Any]]


def load() -> Records:
    """What is on record: the last day of each kind of device."""
    found: Records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    return found


def keep(folder: Path) -> None:
    """Put the day in a folder on record, in place of the last one of its kind of device, and write
    the table."""
    day, probe = (json.loads((folder / f"{name}.json").read_text()) for name in ("gpu", "probe"))
    answers = dict(day.get("answers", {}))
    for asked in probe["answers"]:
        answers[asked["question"]] = {True: "yes", False: "no", None: "-"}[asked["holds"]]
    kind = "simulated" if day["device"] == "simulated" else probe["device"]["gpus"][0]["name"]
    record = {name: day[name] for name in ("date", "minutes")}
    record |= {name: probe["versions"][name] for name in ("torch", "torchao")}
    records = load() | {kind: record | {"answers": answers}}
    RECORDS.write_text(json.dumps(records, indent=2) + "\n")
    write(records)


def table(records: Records) -> str:
    """Markdown: a row a question, a column for the simulated and one for real devices."""
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
    for folder in sys.argv[1:]:
        keep(Path(folder))
    write(load())
