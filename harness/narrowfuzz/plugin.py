"""pytest plugin: options, profiles and fixtures for ``properties/``.

Options start with ``--nf-``. The plugin costs nothing if unused: torch is imported by the fixtures,
not here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from narrowfuzz.case.ladder import BY_NAME

if TYPE_CHECKING:
    from narrowfuzz.case.arm import Compile
    from narrowfuzz.case.spec import ModelName, Spec

#: Eager cases per property, and compiled Specs per rung, which all properties share. A compiler
#: without a number of its own has that of aot_eager.
PROFILES = {
    "smoke": {"none": 6, "aot_eager": 2, "aot_eager_decomp_partition": 2, "inductor": 0},
    "ci": {"none": 150, "aot_eager": 24, "aot_eager_decomp_partition": 10, "inductor": 4},
    "nightly": {"none": 1500, "aot_eager": 200, "aot_eager_decomp_partition": 60, "inductor": 25},
}
#: Seconds of the campaign over recipes that run in processes of their own.
PATCHED_SECONDS = {"smoke": 0.0, "ci": 30.0, "nightly": 300.0}
#: Seconds for making a finding's case smaller.
_MINIMISING = 20.0
#: Statuses of a rule that has judged; repeated here so that ``narrowfuzz.campaign`` is not loaded.
JUDGED = ("ok", "diverged", "crashed", "known")
#: Data draws on each compiled Spec.
_DRAWS = 6


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("narrowfuzz", "narrowfuzz, for its properties (not for your own tests)")
    group.addoption(
        "--nf-profile",
        choices=sorted(PROFILES),
        default="ci",
        help="how many examples: smoke, ci (default) or nightly",
    )
    group.addoption(
        "--nf-recipe",
        action="append",
        default=[],
        metavar="GLOB",
        help="test these recipes; may repeat",
    )
    group.addoption(
        "--nf-recipe-file",
        action="append",
        default=[],
        metavar="FILE",
        help="also load the recipes (RECIPES) of this Python file",
    )
    group.addoption(
        "--nf-device",
        default="cpu",
        help="cpu (default), cuda, cuda:N, or simulated: a Hopper GPU emulated on the CPU",
    )
    group.addoption(
        "--nf-out",
        default="narrowfuzz-runs/pytest",
        metavar="DIR",
        help="folder for findings (default: narrowfuzz-runs/pytest)",
    )
    group.addoption("--nf-no-ledger", action="store_true", help="fail on known issues, too")


def pytest_report_header(config: pytest.Config) -> str:
    from narrowfuzz.machine.environment import versions

    found = versions()
    return (
        f"narrowfuzz: profile {config.getoption('--nf-profile')}, torch {found['torch']}, "
        f"torchao {found['torchao']}, device {config.getoption('--nf-device')}"
    )


def pytest_configure(config: pytest.Config) -> None:
    globs, files = config.getoption("--nf-recipe"), _files(config)
    from narrowfuzz.machine.device import check_device

    if globs or files or config.getoption("--nf-device") != "cpu":
        from narrowfuzz.recipe.recipe import load_every, select

        try:
            check_device(config.getoption("--nf-device"))
            select(load_every(files, globs), globs)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None


def _number(config: pytest.Config) -> int:
    """The number of this pytest-xdist worker: 0 is the first, or the only process."""
    name = getattr(config, "workerinput", {}).get("workerid", "gw0")
    return int(name.removeprefix("gw"))


def _files(config: pytest.Config) -> list[Path]:
    return [Path(file) for file in config.getoption("--nf-recipe-file")]


class Harness:
    """What a property needs: the selected recipes, a judge, and the profile's settings."""

    def __init__(self, config: pytest.Config) -> None:
        from narrowfuzz.machine.environment import prepare

        prepare()
        from narrowfuzz.campaign.testing import Reports
        from narrowfuzz.recipe.source import split_by_source
        from narrowfuzz.triage.session import SessionOptions, open_session

        options = SessionOptions(
            device=config.getoption("--nf-device"),
            worker=_number(config),
            recipes=config.getoption("--nf-recipe"),
            recipe_files=_files(config),
            ledger="none" if config.getoption("--nf-no-ledger") else "tried",
        )
        try:
            session = open_session(options)
            if not (here := session.runnable_recipes()):
                raise ValueError(f"none of these runs here: {', '.join(session.selected)}")
            self.judge, self.reports = session.judge, Reports(session, session.unfiltered_ledger)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        #: True if the user's selection leaves recipes out: rules may have nothing to judge.
        self.narrow = len(session.selected) < len(session.recipes)
        self.recipes, self.stateful = split_by_source(here.values())
        #: Rung -> judgements of its cases.
        self._judgements: dict[str, list[Any]] = {}
        self.profile = config.getoption("--nf-profile")
        self.out = Path(config.getoption("--nf-out"))

    def examples(self, compile: str = "none") -> int:
        """How many examples a property draws under the profile."""
        profile = PROFILES[self.profile]
        return profile.get(compile, profile["aot_eager"])

    def settings(self, compile: str = "none") -> Any:
        """Hypothesis settings: generation only (our own minimiser works on cases), fixed draws
        except in the nightly profile."""
        from hypothesis import HealthCheck, Phase, settings

        return settings(
            max_examples=max(1, self.examples(compile)),
            phases=[Phase.explicit, Phase.generate],
            database=None,
            deadline=None,
            derandomize=self.profile != "nightly",
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        )

    def check_compiled(
        self,
        rules: tuple[str, ...],
        compile: Compile,
        needs: Callable[[Spec], bool] | None = None,
        models: tuple[ModelName, ...] = ("linear",),
    ) -> None:
        """Fail with the full sentence of every first cause of these rules on a compiled rung.

        Compiling is slow, so all properties share the same compiled cases, drawn and judged
        by every rule once a session. If ``rules`` judged none of them, a quarter as many Specs of
        ``models`` that ``needs`` accepts are drawn for them. Skips, with the reason, if the profile
        draws none.
        """
        __tracebackhide__ = True
        if not self.examples(compile):
            pytest.skip(f"profile {self.profile} draws no {compile} cases")
        counts: Counter[str] = Counter()
        for judgement in self._compiled(compile, rules, needs, models):
            counts += _said(judgement, rules, compiled=True)
            self._fail(judgement, rules)
        if not any(counts[status] for status in JUDGED):
            none = f"none of {self.examples(compile)} {compile} Specs was judged"
            if self.examples(compile) < 20:
                pytest.skip(f"{', '.join(rules)}: {none}")
            self._never_judged(rules, counts, none)

    def _fail(self, judgement: Any, rules: tuple[str, ...]) -> None:
        """Fail with the report of these rules' findings on a smaller case, if they have any."""
        __tracebackhide__ = True
        bad = [verdict for verdict in judgement.causes if verdict.rule in rules]
        text = self.reports.of(judgement.case, bad, seconds=_MINIMISING, out=self.out)
        if text:
            pytest.fail(text, pytrace=False)

    def _compiled(
        self,
        compile: Compile,
        rules: tuple[str, ...],
        needs: Callable[[Spec], bool] | None,
        models: tuple[ModelName, ...],
    ) -> list[Any]:
        """Judgements of this rung's cases, made when the first property needs them."""
        from hypothesis import strategies as st

        from narrowfuzz.draw.specs import DIRECT, FACTORS, of_rung, specs

        if compile not in self._judgements:
            # some rules judge a single linear only: half of the Specs are one
            both, direct = (of_rung(self.recipes, compile, vary=vary) for vary in (FACTORS, DIRECT))
            drawn = self._drawn(st.one_of(both, direct), compile, self.examples(compile))
            self._judgements[compile] = drawn
        shared = self._judgements[compile]
        few = self.examples(compile) // 4  # none in the profile smoke: one takes half a minute
        if needs is None or not few or any(_judged(j, rules) for j in shared):
            return shared
        if models == ("linear",):
            fitting = of_rung(self.recipes, compile, vary=DIRECT)
        else:
            fitting = specs(self.recipes, compile=compile, models=models, linears=False, largest=64)
        return shared + self._drawn(fitting.filter(needs), compile, few)

    def _drawn(self, specs: Any, compile: Compile, examples: int) -> list[Any]:
        """Judgements of ``examples`` Specs with ``_DRAWS`` cases each, by all rules that rerun
        nothing."""
        from hypothesis import given, settings

        from narrowfuzz.draw.strategies import batches
        from narrowfuzz.rules import RULES

        rules = [rule for rule in RULES if not rule.reruns]
        found: list[Any] = []

        @settings(self.settings(compile), max_examples=examples)
        @given(batches(specs, draws=_DRAWS))
        def draw(batch: tuple[Any, ...]) -> None:
            for case in batch:
                found.append(self.judge.judge(case, rules))

        draw()
        return found

    def check_schedules(self, rules: tuple[str, ...]) -> None:
        """Like ``check``, on schedules of the stateful recipes that patch nothing."""
        from narrowfuzz.draw.strategies import schedule_cases

        __tracebackhide__ = True
        here = [r for r in self.stateful if not r.process]
        if not here:
            pytest.skip("none of the selected recipes keeps a state and patches nothing")
        self.check(schedule_cases(here), rules)

    def check_patched(self) -> None:
        """Run a short campaign, in processes of its own, over the recipes that patch a library.
        Skips, with the reason, if that is not possible."""
        from narrowfuzz.cli import main
        from narrowfuzz.trace.words import options

        patched = [r for r in self.stateful if r.process]
        if not PATCHED_SECONDS[self.profile]:
            pytest.skip(f"profile {self.profile} starts no campaign")
        if not patched:
            pytest.skip("none of the selected recipes patches a library")
        try:
            for recipe in patched:
                recipe.provide()
        except ValueError as error:
            pytest.skip(str(error))
        minutes = PATCHED_SECONDS[self.profile] / 60
        chosen = options({"--recipe": [r.name for r in patched], "--minutes": [minutes]})
        with pytest.raises(SystemExit) as ended:
            main(["run", *chosen, "--seed", "1"])
        assert ended.value.code == 0, "new findings; see above"

    def check(self, strategy: Any, rules: tuple[str, ...]) -> None:
        """Draw eager cases and fail with the full sentence of every first cause of these rules.

        Fails if no case was ever judged: a property that never applies does not hold. If the rules
        apply to none of the recipes that the user selected, it skips with that reason.
        """
        from hypothesis import given

        from narrowfuzz.triage.triage import needed

        __tracebackhide__ = True
        counts: Counter[str] = Counter()

        @self.settings()
        @given(strategy)
        def run(case: Any) -> None:
            nonlocal counts
            __tracebackhide__ = True
            rules_by_name = {one.name: one for rule in rules for one in needed(rule, case.spec)}
            judgement = self.judge.judge(case, tuple(rules_by_name.values()))
            counts += _said(judgement, rules)
            self._fail(judgement, rules)

        run()
        if not any(counts[status] for status in JUDGED):
            self._never_judged(rules, counts, "no case was judged")

    def _never_judged(self, rules: tuple[str, ...], counts: Counter[str], none: str) -> None:
        """Fail, as a rule that never applies proves nothing. Skip only if the user selected some
        of the recipes, and the rules do not apply to any of their cases: such rules are judged on
        other recipes."""
        __tracebackhide__ = True
        names = ", ".join(rules)
        if self.narrow and counts and set(counts) == {"not_applicable"}:
            chosen = ", ".join((*(r.name for r in self.recipes), *(r.name for r in self.stateful)))
            pytest.skip(f"{names}: {none}, for they do not apply to what was chosen: {chosen}")
        pytest.fail(f"{names}: {none}", pytrace=False)


def _said(judgement: Any, rules: tuple[str, ...], *, compiled: bool = False) -> Counter[str]:
    """Status -> number of verdicts of these rules (with ``compiled``, only on compiled arms)."""
    return Counter(
        v.status
        for v in judgement.verdicts
        if v.rule in rules and not (compiled and not BY_NAME[v.arm].compiled)
    )


def _judged(judgement: Any, rules: tuple[str, ...]) -> bool:
    """True if one of these rules judged a compiled arm."""
    counts = _said(judgement, rules, compiled=True)
    return any(counts[status] for status in JUDGED)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make properties that share compiled cases run on one xdist worker."""
    for item in items:
        rung = getattr(getattr(item, "callspec", None), "params", {}).get("rung")
        if rung:
            item.add_marker(pytest.mark.xdist_group(rung))


@pytest.fixture(scope="session")
def harness(request: pytest.FixtureRequest) -> Harness:
    """Recipes, judge and profile of this session."""
    return Harness(request.config)
