"""``narrowfuzz rule``: explains one rule on one screen, or lists all by name."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding

from narrowfuzz.plants.registry import builtin_plants
from narrowfuzz.recipe.recipe import unknown
from narrowfuzz.rules import BY_NAME
from narrowfuzz.rules.texts import Explained, rows_of, title_of

_KINDS = {
    "exact": "exact: no order of sums and no rounding explains a difference",
    "bound": "bound: proven for every order of sums, from the operands that were multiplied",
    "ratio": "ratio: not proven; reported only if 20 fresh examples show it, too",
}
#: Heading for a rule's text in a further table of the documentation, by page and table.
_ELSEWHERE = {
    ("sharding", "models"): "On several ranks",
    ("sharding", "library"): "In a library's own layers, on ranks",
    ("schedules", "models"): "In a library's own layers (TransformerEngine)",
}


def rule_command(name: str) -> None:
    """Print one rule; "" lists all. Raises ValueError with the nearest match."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not name:
        for rule in sorted(BY_NAME.values(), key=lambda rule: _place(rule.name)):
            console.print(f"{rule.name:9} {title_of(rule.name)}")
        console.print("\nMore on one of them: narrowfuzz rule NAME")
        return
    named = {rule.lower(): rule for rule in BY_NAME}
    if name.lower() not in named:
        raise ValueError(unknown("rule", name, BY_NAME))
    _print(console, named[name.lower()])


def _place(name: str) -> tuple[bool, str, int]:
    """Sort key: rules with a word as their name, then O1, O2, ..., R1, ..., S1, ..."""
    numbered = name[1:].isdigit()
    return numbered, name[:1] if numbered else name, int(name[1:]) if numbered else 0


def _print(console: Console, name: str) -> None:
    rule, (main, *others) = BY_NAME[name], rows_of(name)
    console.print(f"{name}: {title_of(name)}\n")
    parts = {
        "What it says": _sentence(main.says),
        "How strong it is": _kinds(main, rule.strength),
        "Why": main.why,
        "Applies where": main.where or main.needs,
        "What it cannot see": main.blind,
        "A bug that it catches": _caught(main, name),
        **{_ELSEWHERE[row.page, row.table]: _sentence(row.says) for row in others},
        "More": f"docs/{main.page}.md" + (f', "{main.section}"' if main.section else ""),
    }
    for head, text in parts.items():
        if text and text != "none":
            console.print(head)
            console.print(Padding(text, (0, 0, 0, 4)))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _kinds(row: Explained, strength: str) -> str:
    """The strengths of a rule, which may be exact in one thing and bounded in another."""
    text = row.strength or strength
    return "\n".join(words for kind, words in _KINDS.items() if kind in text)


def _caught(row: Explained, name: str) -> str:
    bug = (row.caught or {}).get(name, "")
    planted = builtin_plants().get(bug)
    title = bug if planted is None else f"{bug}: {planted.title}"
    return f"{title} (injected on purpose, to test the rule)" if bug else ""
