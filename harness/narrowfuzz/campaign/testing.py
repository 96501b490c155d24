"""Cases of a user's own model in the user's own tests.

    from hypothesis import given, settings
    from my_model import build
    from narrowfuzz import cases, check

    @settings(deadline=None)
    @given(cases(build, recipes=["torchao.float8.rowwise"]))
    def test_my_block(case):
        check(case)

As in a campaign, a case that fails is made smaller, and gets a script, in a folder under
``narrowfuzz-runs/pytest``. Hypothesis need not shrink: ``settings(phases=[Phase.generate])``.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hypothesis import currently_in_test_context, reject
from hypothesis import strategies as st

from narrowfuzz.case.arm import COMPILED, Compile
from narrowfuzz.case.spec import Case
from narrowfuzz.draw.specs import specs
from narrowfuzz.draw.strategies import batches
from narrowfuzz.machine.environment import prepare, settle
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.own_models import register, source_of
from narrowfuzz.recipe.recipe import Recipe, load_recipes, runnable, select, unknown
from narrowfuzz.report.issue import replay_of
from narrowfuzz.report.judged import blocked_arms
from narrowfuzz.report.store import Store
from narrowfuzz.trace.verdict import Verdict, fingerprint
from narrowfuzz.triage.finding import report

if TYPE_CHECKING:
    from narrowfuzz.judge.fold import Judgement
    from narrowfuzz.ledger.ledger import Ledger
    from narrowfuzz.triage.session import Session

#: Default folder for the findings of tests.
FOUND = Path("narrowfuzz-runs/pytest")


def cases(
    model: str | Callable[[], Any],
    recipes: str | Sequence[str] = (),
    *,
    compile: Compile = "none",
    files: Sequence[str | Path] = (),
) -> st.SearchStrategy[Case]:
    """Cases of a model: ``build`` itself, or FILE.py:build, or package.module:build.

    ``recipes`` are globs; those of the matching recipes that run here are drawn. None: the model as
    it is built. Raises ValueError for a model that cannot be judged, and for a recipe or a compiler
    that does not exist.
    """
    if compile not in COMPILED:
        raise ValueError(unknown("compile", str(compile), COMPILED))
    recipes = (recipes,) if isinstance(recipes, str) else recipes
    paths = [Path(file) for file in ((files,) if isinstance(files, (str, Path)) else files)]
    prepare()
    named = model if isinstance(model, str) else _where(model, sys._getframe(1))
    (made, *others) = register(named)
    pasted = _from_here(named)
    _NAMED.update((one.name, pasted) for one in (made, *others))
    _FILES.update(dict.fromkeys(paths))
    wanted = recipes or (f"torch.{made.fixed['dtype']}",)
    _RECIPES.update(load_recipes(paths, wanted))
    chosen = select(_RECIPES, wanted).values()
    able = [here for recipe in chosen if (here := runnable(recipe, "cpu"))]
    if not able:
        raise ValueError(f"none of {', '.join(wanted)} can run here")
    drawn = specs(
        able, compile=compile, models=tuple(one.name for one in (made, *others)), linears=False
    )
    return batches(drawn, draws=1).map(lambda batch: batch[0])


def _where(build: Callable[[], Any], caller: FrameType) -> str:
    if not (inspect.isfunction(build) or inspect.isclass(build) or inspect.ismethod(build)):
        raise ValueError(
            f"the model is a {type(build).__name__}: give the function that builds it, without "
            "calling it, or FILE.py:build"
        )
    file, name = inspect.getsourcefile(build), build.__qualname__
    if file is None or not name.isidentifier():
        raise ValueError(f"{name} is no function of a file: give the model as FILE.py:build")
    if file == caller.f_code.co_filename:
        raise ValueError(
            f"{name} stands in the file that asks for its cases, and scripts import it: put it "
            "into a file of its own"
        )
    return f"{_of_package(build.__module__, file) or file}:{name}"


def _from_here(model: str) -> str:
    """The same model as a command in this folder has to name it: with the folder of its package, if
    that is another one that only this process searches."""
    source = source_of(model)
    folder = source.where.rpartition(":")[0]
    return model if folder in ("", str(Path.cwd())) else f"{source.where}:{source.build}"


def _of_package(module: str, file: str) -> str:
    """The name of a module if it is this file and belongs to a package, whose other modules it may
    import by relative names; else ""."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return module if "." in module and spec is not None and spec.origin == file else ""


def check(case: Case, *, seconds: float = 20.0, out: Path = FOUND) -> None:
    """Judge a case by every rule; known issues pass.

    Raises AssertionError with the report of each finding, after up to ``seconds`` of making it
    smaller. A divergence that no script shows is a warning. Both are stored in ``out``. A case that
    stops before anything can be judged, as where a known issue refuses its sizes, is a warning,
    too, and is rejected, as by Hypothesis' ``assume``: a test of such cases alone does not pass.
    """
    __tracebackhide__ = True
    if not isinstance(case, Case):
        raise ValueError(f"check takes a case that cases(...) drew, got a {type(case).__name__}")
    reports = _reports()
    reports.session.recipes.update(_RECIPES)
    judgement = reports.session.judge.judge(case)
    if text := reports.of(case, judgement.causes, seconds=seconds, out=out):
        raise AssertionError(text)
    if not judgement.ran:
        _reject(judgement)


def _reject(judgement: Judgement) -> None:
    """Warn that nothing of a case was checked, and tell Hypothesis that it does not count."""
    spec = judgement.case.spec
    blocked = blocked_arms((*judgement.verdicts, *judgement.known), spec.recipe, spec.model)
    why = "; ".join(sorted({one[-1] for one in blocked})) or "its eager run raised"
    of = f"{MODELS[spec.model].title} with {spec.recipe}"
    warnings.warn(f"nothing of a case of {of} was checked: {why}", stacklevel=3)
    if currently_in_test_context():
        reject()


#: The recipes that ``cases`` has loaded, by name: a case holds only the name of its recipe, and
#: ``check`` needs the rest; the files that it was given; and model -> the text that names it. The
#: tests of a process share these and ``_reports``, and nothing else.
_RECIPES: dict[str, Recipe] = {}
_FILES: dict[Path, None] = {}
_NAMED: dict[str, str] = {}


@cache
def _reports() -> Reports:
    from narrowfuzz.machine.device import Device
    from narrowfuzz.triage.session import SessionOptions, open_session

    settle()  # but do not measure how the CPU adds, in a user's tests
    return Reports(open_session(SessionOptions(device=Device())))


@dataclass(frozen=True)
class Reports:
    """Reports of the divergences that the tests of a session show. Each is triaged once, as
    Hypothesis repeats a case that fails."""

    session: Session
    #: The parameter of ``triage``.
    unfiltered_ledger: Ledger | None = None
    #: Fingerprint -> report; "" if the divergence is suspected only.
    texts: dict[str, str] = field(default_factory=dict)

    def of(self, case: Case, causes: Sequence[Verdict], *, seconds: float, out: Path) -> str:
        """The reports of a case's divergences, one for each fingerprint, each after up to
        ``seconds`` of making the case smaller. A divergence that no script shows is a warning
        instead."""
        family = self.session.judge.family(case.spec)
        names = dict.fromkeys(fingerprint(verdict, family) for verdict in causes)
        for verdict in causes:
            if (name := fingerprint(verdict, family)) not in self.texts:
                self.texts[name] = self._report(case, verdict, seconds, out)
        texts = [self.texts[name] for name in names]
        return "\n\n".join(text for text in texts if text)

    def _report(self, case: Case, verdict: Verdict, seconds: float, out: Path) -> str:
        from narrowfuzz.triage.triage import triage

        judge, files = self.session.judge, (*self.session.options.recipe_files, *_FILES)
        found = triage(
            judge,
            case,
            verdict,
            seconds=seconds,
            files=files,
            unfiltered_ledger=self.unfiltered_ledger,
        )
        Store(out).add(found.finding, found.script)
        folder = out / "findings" / found.finding.id
        named = _NAMED.get(found.finding.minimal.spec.model, "")
        replay = replay_of(found.finding, folder, files, named)
        text = f"{report(found.finding, replay)}\n  script: {folder}/repro.py"
        if found.confirmed:
            return text
        warnings.warn(f"suspected, {found.finding.why_suspected}: {text}", stacklevel=2)
        return ""
