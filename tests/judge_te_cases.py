"""Judge the cases in a JSON file on TransformerEngine, in a process of its own: FILE -> one JSON
list per case, the sentences of what diverged; null where nothing ran."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from narrowfuzz.case.spec import load_case
from narrowfuzz.judge.judge import Judge
from narrowfuzz.ledger.ledger import load_ledger
from narrowfuzz.machine.environment import prepare, settle
from narrowfuzz.recipe.recipe import load_every
from te_on_cpu.environment import enter


def main(file: str) -> None:
    prepare()
    enter()
    settle()
    for case in json.loads(Path(file).read_text()):
        judge = Judge(load_every(), load_ledger())
        judgement = judge.judge(load_case(json.dumps(case).encode()))
        print(json.dumps([v.sentence() for v in judgement.causes] if judgement.ran else None))


if __name__ == "__main__":
    main(sys.argv[1])
