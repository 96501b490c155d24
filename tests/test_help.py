"""Every help text is for a reader who meets the project for the first time."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer
from fresh import ends
from narrowfuzz.cli import app

#: Words that only the code uses, and riddles.
PRIVATE = re.compile(
    r"\b(drawn?|draws|rungs?|oracles?|specs?|ledger|granules?|told|hunt|radius|campaign|planted)\b"
)
COMMANDS: dict[str, Any] = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
OPTIONS = [
    (name, option)
    for name, command in COMMANDS.items()
    for option in command.params
    if getattr(option, "help", None)
]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_in_one_sentence_what_it_does(name: str) -> None:
    text = (COMMANDS[name].help or "").strip()
    head = text.split("\n\n")[0]
    assert text and "\n" not in head and head[0].isupper() and head[-1] in ".?"
    assert not PRIVATE.search(text.lower())


@pytest.mark.parametrize(("name", "option"), OPTIONS, ids=lambda one: getattr(one, "name", one))
def test_an_option_is_a_sentence_without_private_words(name: str, option: Any) -> None:
    text = option.help
    assert text is not None
    assert text.endswith(".") and not PRIVATE.search(text.lower()), text
    assert not [form for form in option.secondary_opts if form.startswith("--no-no-")]


def test_the_recipe_that_check_takes_when_none_is_given_is_in_its_help() -> None:
    (recipe,) = [o for name, o in OPTIONS if name == "check" and o.name == "recipes"]
    assert "torch.DTYPE" in str(recipe.show_default)


def test_the_old_name_of_a_list_still_works_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    def listed(what: str) -> tuple[str, str]:
        assert ends("list", what) == 0
        out, err = capfd.readouterr()
        return out, err

    rules, nothing = listed("rules")
    oracles, said = listed("oracles")
    assert rules == oracles and not nothing and "use list rules" in said


def test_the_pytest_options_have_help_without_private_words() -> None:
    from narrowfuzz.plugin import pytest_addoption

    parser = pytest.Parser(_ispytest=True)
    pytest_addoption(parser)
    (group,) = [g for g in parser._groups if g.name == "narrowfuzz"]
    helps = [option.attrs()["help"] for option in group.options]
    assert len(helps) >= 6 and not [h for h in helps if PRIVATE.search(h)]
