"""The pytest plugin: options, refusals, and what a failing property prints."""

from __future__ import annotations

import json
import runpy
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from fresh import python
from narrowfuzz.case.kind import LINEAR
from narrowfuzz.plugin import Harness
from narrowfuzz.rules import RULES
from narrowfuzz.triage.verify import RunScript

pytest_plugins = ("pytester",)

#: A suite of somebody's own; the installed entry point brings the plugin.
PROPERTY = """
import pytest
from narrowfuzz.draw.strategies import cases
from hypothesis import strategies as st

@pytest.mark.parametrize("rule", {rules!r})
def test_promise(harness, rule):
    harness.check(cases(harness.recipes, largest=32), (rule,))
"""
#: A recipe whose plan promises what the library does not keep: twice the scale.
LIAR = """
import dataclasses
from narrowfuzz.recipe.recipe import load_recipes
honest = load_recipes()["torchao.float8.rowwise"]
honest = dataclasses.replace(honest, backends=("emulated",))

def plan(spec):
    import dataclasses
    from narrowfuzz.numerics.plan import Fp32Scale, Plan
    gemms = dict(honest.plan(spec).gemms)
    scale = Fp32Scale(eps=1e-12, power_of_two=False)
    gemms = {role: dataclasses.replace(g, a=dataclasses.replace(g.a, scale=scale))
             for role, g in gemms.items()}
    return Plan(gemms)

RECIPES = [dataclasses.replace(honest, name="mine.liar", plan=plan)]
"""


#: A session of its own in the suite's folder, in a copy of a process that has imported torch.
SESSION = """
import os, sys, pytest
os.environ.pop("PYTEST_ADDOPTS", None)
os.chdir({folder!r})
for number, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
{call}
"""
#: Session or command, with its arguments: the result.
Run = Callable[..., pytest.RunResult]


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return pytester


@pytest.fixture
def called(suite: pytest.Pytester, scripts: RunScript) -> Run:
    """Runs a call that ends the process."""

    def run(call: str) -> pytest.RunResult:
        script = suite.path / "session"
        script.write_text(SESSION.format(folder=str(suite.path), call=call))
        ended = scripts(script)
        assert ended.code is not None, ended
        out, err = ((suite.path / name).read_text().splitlines() for name in ("out", "err"))
        return pytest.RunResult(ended.code, out, err, 0.0)

    return run


@pytest.fixture
def run(called: Run) -> Run:
    """Runs the suite with these options."""
    return lambda *args: called(f"sys.exit(pytest.main({['-p', 'no:cacheprovider', *args]!r}))")


def test_its_options_are_in_the_help(run: Run) -> None:
    result = run("--help")
    for option in ("profile", "recipe", "recipe-file", "device", "no-ledger"):
        result.stdout.fnmatch_lines([f"*--nf-{option}*"])


def test_the_checkouts_conftest_goes_with_an_installed_plugin(suite: pytest.Pytester) -> None:
    """The checkout's conftest loads it where no entry point does; both together are no clash."""
    suite.makeconftest((Path(__file__).resolve().parents[1] / "conftest.py").read_text())
    suite.makepyfile("def test_nothing(): pass")
    suite.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--nf-recipe", "torch.fp23"], "*did you mean 'torch.fp32'?*"),
        (["--nf-recipe-file", "nowhere.py"], "*nowhere.py*does not exist*"),
        (["--nf-profile", "thorough"], "*--nf-profile*invalid choice*"),
        (["--nf-device", "tpu"], "*--device must be one of cpu, cuda, simulated*"),
    ],
)
def test_a_bad_option_is_a_usage_error(
    suite: pytest.Pytester, run: Run, args: list[str], says: str
) -> None:
    suite.makepyfile(PROPERTY.format(rules=["O6"]))
    result = run(*args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([says])
    result.stdout.no_fnmatch_line("*Traceback*")


@pytest.mark.slow
def test_a_property_that_holds_passes_and_one_never_judged_fails(
    suite: pytest.Pytester, run: Run
) -> None:
    suite.makepyfile(
        PROPERTY.format(rules=["O6", "O1", "O3"]).replace(
            "harness.recipes", "plain(harness.recipes)"
        )
        + "def plain(recipes): return [r for r in recipes if r.name == 'torch.fp32']\n"
    )
    result = run("--nf-profile", "smoke")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["narrowfuzz: profile smoke, torch *", "*O3: no case was judged*"])


@pytest.mark.slow
def test_a_narrow_choice_that_leaves_a_rule_nothing_skips_and_says_why(
    suite: pytest.Pytester, run: Run
) -> None:
    """R21 is about recipes with powers of two: that torch.fp32 has none is no fault of a user."""
    suite.makepyfile(PROPERTY.format(rules=["O6", "O3", "R21"]))
    result = run("-rs", "--nf-profile", "smoke", "--nf-recipe", "torch.fp32")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED*O3*torch.fp32*"])


@pytest.mark.slow
@pytest.mark.heavy
def test_what_does_not_apply_hides_no_bug_of_a_narrow_choice(
    suite: pytest.Pytester, run: Run
) -> None:
    suite.makepyfile(PROPERTY.format(rules=["O22", "O3"]))
    Path("mine.py").write_text(LIAR)
    result = run(
        "-x", "--nf-profile", "smoke", "--nf-recipe", "mine.*", "--nf-recipe-file", "mine.py",
        "--nf-no-ledger",
    )  # fmt: skip
    result.assert_outcomes(skipped=1, failed=1)
    result.stdout.fnmatch_lines(["*configuration: mine.liar (*), eager", "*fingerprint O3--*"])


def test_a_choice_that_is_not_judged_for_another_reason_fails() -> None:
    """What a rule could not decide is no rule that does not apply, however narrow the choice."""
    harness = object.__new__(Harness)
    harness.narrow, harness.recipes, harness.stateful = True, [], []
    for said in ({"inconclusive": 1}, {"inconclusive": 1, "not_applicable": 5}, {}):
        with pytest.raises(pytest.fail.Exception, match="R21: no case was judged"):
            harness._never_judged(("R21",), Counter(said), "no case was judged")
    with pytest.raises(pytest.skip.Exception):
        harness._never_judged(("R21",), Counter({"not_applicable": 5}), "no case was judged")
    harness.narrow = False
    with pytest.raises(pytest.fail.Exception):
        harness._never_judged(("R21",), Counter({"not_applicable": 5}), "no case was judged")


@pytest.mark.slow
@pytest.mark.heavy
def test_a_failure_says_what_where_how_far_and_how_to_replay(
    suite: pytest.Pytester, run: Run, called: Run
) -> None:
    suite.makepyfile(PROPERTY.format(rules=["O3"]))
    Path("mine.py").write_text(LIAR)
    result = run(
        "--nf-profile", "smoke", "--nf-recipe", "mine.*", "--nf-recipe-file", "mine.py",
        "--nf-no-ledger", "--nf-out", "kept",
    )  # fmt: skip
    result.assert_outcomes(failed=1)
    assert result.stdout.str().count("found by: narrowfuzz rule O3") == 1
    result.stdout.fnmatch_lines(
        [
            "*scale of the *: expected *, got *",
            "*configuration: mine.liar (emulated), eager",
            "*smallest example: 1 token, 1 in, 1 out, *",
            "*found by: narrowfuzz rule O3",
            "*replay: narrowfuzz replay kept/findings/* --recipe-file mine.py",
            "*script: kept/findings/*/repro.py",
        ]
    )
    (folder,) = Path("kept/findings").iterdir()
    assert json.loads((folder / "explain.json").read_text())["known_issue"] == "", "it was asked"
    command = ["replay", str(folder), "--recipe-file", "mine.py", "--arm", "eager"]
    replay = called(f"from narrowfuzz.cli import main; main({command!r})")
    assert replay.ret == 1
    replay.stdout.fnmatch_lines(["*mine.liar, eager; found by: narrowfuzz rule O3*"])
    python(folder / "repro.py", code=1)


@pytest.mark.heavy
@pytest.mark.slow
def test_it_runs_under_xdist(suite: pytest.Pytester, run: Run) -> None:
    pytest.importorskip("xdist")
    suite.makepyfile(PROPERTY.format(rules=["O6", "O5"]))
    result = run("-n", "2", "--nf-profile", "smoke", "--nf-recipe", "torch.bf16")
    result.assert_outcomes(passed=2)


@pytest.mark.slow
def test_a_profile_that_draws_no_such_case_skips_with_the_reason(
    suite: pytest.Pytester, run: Run
) -> None:
    suite.makepyfile(
        """
        def test_compiled(harness):
            harness.check_compiled(("O6",), "inductor")
        """
    )
    result = run("-rs", "--nf-profile", "smoke", "--nf-recipe", "torch.bf16")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*profile smoke draws no inductor cases*"])


def test_a_project_with_a_package_called_harness_keeps_it(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        **{
            "harness/__init__": "MINE = 1",
            "test_mine": "import harness\ndef test_mine(): assert harness.MINE",
        }
    )
    result = suite.run(sys.executable, "-m", "pytest", "-q", "test_mine.py")
    result.assert_outcomes(passed=1)


def test_every_rule_has_a_property() -> None:
    """What holds in a campaign holds in the property tests, too."""
    folder = Path(__file__).resolve().parents[1] / "properties"
    told = runpy.run_path(str(folder / "test_rules.py"))["PROPERTIES"]
    names = [promise.name for promise in told]
    assert len(names) == len(set(names))
    judged = {rule for promise in told for rule in promise.rules}
    assert judged == {rule.name for rule in RULES if LINEAR in rule.cases}
    assert all(set(promise.compiled) <= set(promise.rules) for promise in told)
