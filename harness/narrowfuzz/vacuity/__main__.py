"""Which passes could not have failed: ``python -m narrowfuzz.vacuity --cases 40 --seed 1``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from narrowfuzz.case import COMPILED
from narrowfuzz.environment import prepare


def main() -> None:
    """Exit 2: a recipe or a device that does not exist."""
    options = _parser().parse_args()
    prepare()
    from narrowfuzz.device import check_device
    from narrowfuzz.vacuity.report import lines, record
    from narrowfuzz.vacuity.run import chosen, run

    try:
        check_device(options.device)
        recipes = chosen(options.recipe)
    except ValueError as error:
        print(f"narrowfuzz: {error}", file=sys.stderr)
        sys.exit(2)
    found = run(recipes, options.cases, options.seed, options.compile, options.device)
    print("\n".join(lines(found)))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(record(found))))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m narrowfuzz.vacuity", description=__doc__)
    parser.add_argument("--cases", type=int, default=40, help="cases of each recipe")
    parser.add_argument("--seed", type=int, default=0, help="reproduce a measurement's draws")
    parser.add_argument("--recipe", action="append", default=[], help="recipes (glob)")
    parser.add_argument("--compile", choices=("none", *COMPILED), default="none")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or simulated")
    parser.add_argument("--json", type=Path, help="write the table with examples here")
    return parser


if __name__ == "__main__":
    main()
