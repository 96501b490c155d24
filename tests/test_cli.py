"""The command line: exit codes, one sentence for a user's mistake, and nothing left behind."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fresh import ends, python
from narrowfuzz.arms.available import unavailable
from narrowfuzz.case.arm import INDUCTOR
from narrowfuzz.case.ladder import LADDER
from narrowfuzz.case.spec import MAX_CASE_BYTES, SCHEMA, Case, DataSpec, Spec, dump_case
from narrowfuzz.machine.environment import versions
from narrowfuzz.machine.machine import machine
from narrowfuzz.report.replay import Replayed, print_replayed
from narrowfuzz.report.tally import Tally

CLEAN = Case(spec=Spec(recipe="torch.fp32", dtype="fp32"), data=DataSpec())
#: torchao's wrapper tensor ignores the bias: a real divergence of 0.18.
NO_BIAS = Case(
    spec=Spec(recipe="torchao.mxfp8.rceil", backend="wrapper", bias=True), data=DataSpec()
)
KINDS = ("recipes", "models", "arms", "rules", "faults", "known")
Result = tuple[int, str, str]
#: Runs a command line, and one that is refused in a sentence.
Run, Refused = Callable[..., Result], Callable[..., str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Commands run in an empty folder and get their environment back as it was."""
    before = dict(os.environ)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def nf(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process: (exit code, stdout, stderr)."""

    def run(*argv: object) -> Result:
        capfd.readouterr()
        return (ends(*map(str, argv)), *capfd.readouterr())

    return run


@pytest.fixture
def refused(nf: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """The one sentence a bad command line gets; no output, no file, no campaign."""

    def started(*args: Any) -> None:
        raise AssertionError("a campaign was started")

    monkeypatch.setattr("narrowfuzz.campaign.supervisor.run_campaign", started)

    def run(*argv: object) -> str:
        before = sorted(here.rglob("*"))
        code, out, err = nf(*argv)
        assert code == 2, (code, out, err)
        assert out == ""
        assert err.startswith("narrowfuzz: ") and err.count("\n") == 1 and err.endswith("\n"), err
        assert sorted(here.rglob("*")) == before
        sentence = err.removeprefix("narrowfuzz: ").strip()
        assert sentence
        return sentence

    return run


@pytest.mark.parametrize(
    "argv", [["--help"], ["run", "--help"], ["replay", "--help"]], ids=" ".join
)
def test_help_loads_nothing_heavy(argv: list[str]) -> None:
    code = f"""
import sys
from narrowfuzz.cli import main
try:
    main({argv!r})
except SystemExit as stopped:
    assert stopped.code == 0, stopped.code
heavy = {{"torch", "torchao", "numpy", "hypothesis", "pytest", "sqlite3"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = python("-c", code)
    assert "Usage" in done.stdout and not done.stderr


def test_the_bare_command_shows_its_help_and_no_empty_sentence(nf: Run) -> None:
    _, out, err = nf()
    assert "Usage" in out + err
    assert "narrowfuzz: \n" not in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["frobnicate"], "frobnicate"),
        (["run", "--bogus"], "--bogus"),
        (["run", "extra"], "extra"),
        (["run", "--recipe"], "--recipe"),
        (["replay"], "argument"),
        (["run", "--recipe", "torch.fp23"], "did you mean 'torch.fp32'?"),
        (["run", "--recipe", "torchao.float8.rowise"], "did you mean 'torchao.float8.rowwise'?"),
        (["run", "--recipe", "torch.fp32", "--recipe", "zzz*"], "unknown recipe 'zzz*'"),
        (["run", "--arm", "egaer"], "did you mean 'eager'?"),
        (["run", "--arm", "zzz*"], "unknown arm 'zzz*'"),
        (["run", "--model", "mlp_swigul"], "did you mean 'mlp_swiglu'?"),
        (["run", "--model", "nofile.py:build"], "there is no file nofile.py"),
        (["run", "--model", "mlp_gelu", "--recipe", "te.delayed"], "te.delayed: a library's own"),
        (["check", "llama.py"], "write FILE.py:build or package.module:build"),
        (["check", "x.py:build", "--compile", "inductr"], "did you mean 'inductor'?"),
        (["check", "x.py:build", "--checkpoint", "some"], "did you mean 'none'?"),
        (["run", "--ledger", "nowhere"], "there is no entry"),
        (["run", "--baseline", "nowhere"], "no run is there"),
        (["run", "--suppress", "nowhere.toml"], "No such file"),
        (["report", "nowhere"], "is no case file, no finding's folder"),
        (["run", "--plant", "gemm-gane"], "did you mean 'gemm-gain'?"),
        (["run", "--plant", "nofile.py:gain"], "nofile.py"),
        (["run", "-q", "-v"], "give one of them"),
        (["list", "recipe"], "did you mean 'recipes'?"),
        (["list", "zzz"], "known: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_unknown_name_is_refused_with_the_nearest_match(
    refused: Refused, argv: list[str], says: str
) -> None:
    assert says in refused(*argv)


@pytest.mark.one_in(16)
@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--minutes", v) for v in ("0", "-1", "nan", "inf", "1e9", "soon", "")),
        *(("--workers", v) for v in ("-1", "65", "1000", "2.5", "many")),
        *(("--seed", v) for v in ("-1", "4294967296", "lucky", "1.5")),
    ],
)
def test_a_number_out_of_range_is_refused_by_the_name_of_its_option(
    refused: Refused, option: str, value: str
) -> None:
    assert option in refused("run", f"{option}={value}", "--out", "new")


@pytest.mark.parametrize("device", ["bogus", "cuda:0", "cuda:"])
def test_an_unknown_device_is_refused(refused: Refused, device: str) -> None:
    assert "--device" in refused("run", f"--device={device}")


def test_cuda_is_refused_where_there_is_none(refused: Refused) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for name in ("cuda", "cuda:7"):
        told = refused("run", "--device", name, "--out", "new")
        assert f"--device {name}: " in told and "run on cpu or simulated" in told
    assert "must be one of cpu" in refused("run", "--device", "tpu", "--out", "new")


def test_zero_workers_means_one_per_core(
    nf: Run, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    configs = campaigns(monkeypatch)
    assert nf("run", "--workers", "0", "--out", "new")[0] == 0
    assert configs[0].workers == os.cpu_count()
    assert 0 <= configs[0].seed < 2**32


def test_options_reach_the_campaign(nf: Run, monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    configs = campaigns(monkeypatch)
    argv = ["run", "--seed", 4294967295, "--minutes", 0.5, "--workers", 64, "--out", "new"]
    assert nf(*argv, "--recipe", "torch.*", "--arm", "eager*", "--plant", "gemm-gain")[0] == 0
    (config,) = configs
    assert (config.seed, config.minutes, config.workers) == (2**32 - 1, 0.5, 64)
    assert set(config.recipes) == {"torch.fp32", "torch.bf16", "torch.fp16", "torch.scaled_mm"}
    assert (config.arms, config.plant, config.out) == (("eager*",), ("", "gemm-gain"), Path("new"))


def test_each_resumed_run_draws_something_new(
    nf: Run, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    configs = campaigns(monkeypatch, journal=True)
    for resume in ([], ["--resume"], ["--resume"]):
        assert nf("run", "--seed", 1, "--workers", 1, "--out", "new", *resume)[0] == 0
    assert len({config.part for config in configs}) == 3


def campaigns(monkeypatch: pytest.MonkeyPatch, *, journal: bool = False) -> list[Any]:
    """Replace the supervisor by one that runs nothing; returns the configs it is given."""
    from narrowfuzz.campaign import supervisor

    configs: list[Any] = []

    def run_campaign(config: Any, store: Any, progress: Any) -> Tally:
        configs.append(config)
        if journal:
            (store.out / "journal" / "0.json").write_bytes(dump_case(CLEAN))
        return Tally()

    monkeypatch.setattr(supervisor, "run_campaign", run_campaign)
    return configs


class TestJson:
    """One document on standard output, and nothing else."""

    @pytest.mark.parametrize("kind", [*KINDS, "controls"])
    def test_list_has_a_record_for_each_row(self, nf: Run, kind: str) -> None:
        code, out, err = nf("list", kind, "--json")
        assert (code, err) == (0, "")
        records = json.loads(out)
        assert records and all(record["id"] for record in records)
        assert len({record["id"] for record in records}) == len(records)

    def test_what_is_known_has_all_that_a_program_asks_for(self, nf: Run) -> None:
        records = json.loads(nf("list", "known", "--json")[1])
        names = {"id", "severity", "recipes", "title", "workaround", "links"}
        names |= {"kind", "cause", "same_cause"}
        assert all(set(record) == names for record in records)
        assert {record["severity"] for record in records} == {"high", "medium", "low"}

    def test_what_cannot_run_has_its_reason(
        self, nf: Run, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(here))
        arms = {record["id"]: record for record in json.loads(nf("list", "arms", "--json")[1])}
        assert arms["eager"]["here"] == "available" and "g++" in arms["inductor"]["here"]
        doctor = json.loads(nf("doctor", "--json")[1])
        assert {"id": "inductor", "here": arms["inductor"]["here"]} in doctor["arms"]
        assert doctor["g++"] == "" and doctor["problems"] == []

    def test_doctor(self, nf: Run) -> None:
        code, out, _ = nf("doctor", "--json")
        assert code == 0
        report = json.loads(out)
        assert report["versions"]["torch"] != "absent" and report["machine"]["policies"]
        assert report["ledger"]["entries"] > 50 and report["verified"]["records"]
        assert bool(report["verified"]["remedy"]) is not report["verified"]["these_versions"]

    def test_replay_of_each_outcome(self, nf: Run, here: Path) -> None:
        (here / "clean.json").write_bytes(dump_case(CLEAN))
        (here / "fails.json").write_bytes(dump_case(NO_BIAS))
        kept(here / "abc1", NO_BIAS)
        kept(here / "abc2", CLEAN)
        told = {}
        for target in ("clean.json", "fails.json", "abc1", "abc2"):
            code, out, _ = nf("replay", target, "--json")
            told[target] = json.loads(out)
            assert code == (1 if told[target]["sentence"] else 0)
        assert {name: one["outcome"] for name, one in told.items()} == {
            "clean.json": "sound", "fails.json": "still failing", "abc1": "diverges otherwise",
            "abc2": "fixed",
        }  # fmt: skip
        fails = told["fails.json"]
        assert fails["case"] == NO_BIAS.id and fails["arm"] == "eager" and fails["rule"]
        assert fails["fingerprint"].startswith(f"{fails['rule']}--")
        assert "bias" in fails["entry"], "the ledger knows it"
        assert told["clean.json"]["reason"] == "no divergence on eager"
        kept(here / "abc3", CLEAN, oracle="O8", arm="aot_eager")
        code, out, _ = nf("replay", "abc3", "--arm", "eager", "--json")
        cannot = json.loads(out)
        assert (code, cannot["outcome"]) == (125, "cannot tell")
        assert "no verdict of O8 on aot_eager" in cannot["reason"]

    def test_run_prints_its_summary_whatever_workers_print(
        self, nf: Run, monkeypatch: pytest.MonkeyPatch, here: Path
    ) -> None:
        from narrowfuzz.campaign import supervisor

        def run_campaign(config: Any, store: Any, progress: Any) -> Tally:
            print("a line of a model's")
            os.write(1, b"a line of a library's\n")
            return Tally(notes=["a note"])

        monkeypatch.setattr(supervisor, "run_campaign", run_campaign)
        code, out, err = nf("run", "--out", "new", "--recipe", "torch.fp32", "--json")
        assert code == 0 and out == (here / "new" / "summary.json").read_text()
        assert json.loads(out)["notes"] == ["a note"]
        for text in ("a line of a model's", "a line of a library's", "New findings: 0"):
            assert text in err
        assert nf("run", "--out", "new", "--json")[:2] == (2, "")

    def test_what_is_refused_leaves_no_document(self, nf: Run) -> None:
        assert nf("list", "zzz", "--json")[:2] == (2, "")
        assert nf("list", "models", "--json")[0] == 0, "standard output is back"


@pytest.mark.heavy
def test_a_quiet_run_says_the_verdict_and_nothing_around_it(
    nf: Run, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    campaigns(monkeypatch)
    code, out, _ = nf("run", "-q", "--out", "new", "--recipe", "torch.fp32", "--arm", "eager")
    assert code == 0
    said = [line for line in out.splitlines() if line]
    assert len(said) == 2 and said[0].startswith("New findings: 0") and "Judged: 0 of" in said[1]
    usual = nf("run", "--out", "other", "--recipe", "torch.fp32", "--arm", "eager")[1]
    assert "recipes: torch.fp32" in usual and "Output: other" in usual
    assert "how it adds" not in usual
    more = nf("run", "-v", "--out", "third", "--recipe", "torch.fp32", "--arm", "eager")[1]
    assert "how it adds" in more


class TestOutputFolder:
    def test_a_file_is_no_folder(self, refused: Refused, here: Path) -> None:
        (here / "taken").write_text("")
        assert "taken" in refused("run", "--out", "taken")

    @pytest.mark.parametrize("out", ["taken/below", "/proc/narrowfuzz", "x" * 300])
    def test_what_cannot_be_written_is_refused(
        self, refused: Refused, here: Path, out: str
    ) -> None:
        (here / "taken").write_text("")
        assert out[:20] in refused("run", "--out", out)

    @pytest.mark.heavy
    def test_an_earlier_run_is_not_overwritten(
        self, nf: Run, refused: Refused,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        campaigns(monkeypatch)
        assert nf("run", "--out", "old")[0] == 0
        assert "--resume" in refused("run", "--out", "old")

    def test_resume_needs_a_run(self, refused: Refused, here: Path) -> None:
        (here / "empty").mkdir()
        assert "--out" in refused("run", "--resume")
        assert "empty" in refused("run", "--resume", "--out", "empty")
        assert "nowhere" in refused("run", "--resume", "--out", "nowhere")

    def test_a_broken_database_is_refused(self, refused: Refused, here: Path) -> None:
        for folder in ("findings", "claims", "journal"):
            (here / "old" / folder).mkdir(parents=True)
        (here / "old" / "findings.db").write_bytes(b"not a database, but long enough to be read")
        assert "old" in refused("run", "--resume", "--out", "old")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "does not exist"),
        ("def (", "SyntaxError"),
        ("raise RuntimeError('first\\nsecond')", "RuntimeError: first second"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("recipes = []", "RECIPES"),
        ("RECIPES = 3", "RECIPES"),
        ("RECIPES = ['torch.fp32']", "RECIPES"),
        ("import no_such_module_here", "no_such_module_here"),
        ("from harness import Recipe", "write 'from narrowfuzz import Recipe'"),
        ("from harness.recipe import Recipe", "write 'from narrowfuzz import Recipe'"),
        ("from narrowfuzz.recipe import Recipe", "write 'from narrowfuzz import Recipe'"),
        (
            "from narrowfuzz.stateful import Subject",
            "write 'from narrowfuzz.recipe.stateful import Subject'",
        ),
        ("import harness.case", "write 'import narrowfuzz.case.spec'"),
        (
            "from harness.numerics.plan import ROLES",
            "write 'from narrowfuzz.numerics.plan import ROLES'",
        ),
        ("from narrowfuzz.schedule import events", "write 'from narrowfuzz.case import events'"),
        (
            "from narrowfuzz.trainings import check_events",
            "write 'from narrowfuzz.case.trainings import check_events'",
        ),
        (
            "from narrowfuzz.stateful import Recipe, Subject",
            "write 'from narrowfuzz import Recipe; from narrowfuzz.recipe.stateful import Sub",
        ),
    ],
)
@pytest.mark.parametrize("command", ["run", "list", "replay"])
def test_a_bad_recipe_file_is_refused_by_name(
    refused: Refused, here: Path, command: str, text: str | None, says: str
) -> None:
    (here / "case.json").write_bytes(dump_case(CLEAN))
    if text is not None:
        (here / "mine.py").write_text(text)
    argument = {"run": [], "list": ["recipes"], "replay": ["case.json"]}[command]
    sentence = refused(command, *argument, "--recipe-file", "mine.py")
    assert "mine.py" in sentence and says in sentence


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("PLANTS = [", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("faults = []", "PLANTS"),
        ("from harness import Plant", "write 'from narrowfuzz import Plant'"),
        ("from harness.narrowfuzz import Plant", "write 'from narrowfuzz import Plant'"),
        ("from harness import mine", "raised"),  # a package of their own
        ("from narrowfuzz import Plant\nPLANTS = [Plant('a', 'f', 't', 'l', (), None)]", "recipe"),
        (
            "from narrowfuzz import Plant\nPLANTS = [Plant('gain', 'f', 't', 'l', ('*',), None)]",
            "did you mean 'gain'?",
        ),
    ],
)
def test_a_bad_plant_file_is_refused_before_the_campaign(
    refused: Refused, here: Path, text: str, says: str
) -> None:
    (here / "faults.py").write_text(text)
    assert says in refused("run", "--plant", "faults.py:gian", "--out", "new")


def as_json(case: Case, **spec: Any) -> dict[str, Any]:
    raw = json.loads(dump_case(case))
    raw["spec"].update(spec)
    return raw


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (dump_case(CLEAN)[:-20], "not a valid case"),
        (b"", "not a valid case"),
        (b"\x00\xff\xfe\x80" * 50, "not a valid case"),
        (b"[" * 100_000, "not a valid case"),
        (b'{"schema":1,"spec":' + b'{"a":' * 50_000, "not a valid case"),
        (b" " * (MAX_CASE_BYTES + 1), "bytes"),
        (b"[]", "not a valid case"),
        (json.dumps(as_json(CLEAN) | {"schema": SCHEMA + 1}).encode(), "update narrowfuzz"),
        (json.dumps(as_json(CLEAN) | {"schema": 0}).encode(), "schema 0"),
        (json.dumps(as_json(CLEAN) | {"exec": "rm"}).encode(), "exec"),
        (json.dumps(as_json(CLEAN, m=5000)).encode(), "4096"),
        (json.dumps(as_json(CLEAN, recipe="torch.fp23")).encode(), "did you mean 'torch.fp32'?"),
        (json.dumps(as_json(CLEAN, recipe="os.system")).encode(), "unknown recipe 'os.system'"),
        (json.dumps(as_json(CLEAN, recipe="antigravity")).encode(), "unknown recipe 'antigravity'"),
        (json.dumps(as_json(CLEAN, recipe="../mine.py")).encode(), "unknown recipe '../mine.py'"),
        (json.dumps(as_json(CLEAN, backend="natve")).encode(), "did you mean 'native'?"),
        (json.dumps(as_json(CLEAN, backend="os:system")).encode(), "unknown backend 'os:system'"),
        (json.dumps(as_json(CLEAN, model="antigravity:fly")).encode(), "antigravity"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_case_that_is_none_is_refused_and_nothing_in_it_is_imported(
    refused: Refused, here: Path, raw: bytes, says: str
) -> None:
    (here / "case.json").write_bytes(raw)
    assert says in refused("replay", "case.json")
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "target", ["nowhere.json", "9f2c1a", "..", "", "*", "/dev/null", "a b", "x" * 300],
    ids=lambda target: target[:12],
)  # fmt: skip
def test_a_target_that_is_no_case_is_refused(refused: Refused, target: str) -> None:
    assert target[:20] in refused("replay", target)


def test_a_case_pasted_instead_of_its_file_is_refused(refused: Refused) -> None:
    assert "case file" in refused("replay", dump_case(CLEAN).decode())


class TestFindingFolder:
    @pytest.mark.parametrize(
        "raw", [None, b"", b"{}", b"\xff\x00", b"[" * 100_000, dump_case(CLEAN)],
        ids=("missing", "empty", "no fields", "binary", "deep", "a case"),
    )  # fmt: skip
    def test_a_folder_that_is_no_finding_is_refused(
        self, refused: Refused, here: Path, raw: bytes | None
    ) -> None:
        (here / "abc").mkdir()
        if raw is not None:
            (here / "abc" / "explain.json").write_bytes(raw)
        assert "abc" in refused("replay", "abc")

    def test_a_finding_of_a_later_version_is_refused(self, refused: Refused, here: Path) -> None:
        kept(here / "abc", CLEAN, minimal=json.loads(dump_case(CLEAN)) | {"schema": SCHEMA + 1})
        assert "schema" in refused("replay", "abc")

    def test_an_id_that_fits_two_findings_is_refused(self, refused: Refused, here: Path) -> None:
        for name in ("abc1", "abc2"):
            kept(here / f"narrowfuzz-runs/run/findings/{name}", CLEAN)
        assert "abc1" in (said := refused("replay", "abc")) and "abc2" in said

    def test_an_id_that_two_runs_hold_is_refused_by_their_folders(
        self, refused: Refused, here: Path
    ) -> None:
        for run in ("one", "two"):
            kept(here / f"narrowfuzz-runs/{run}/findings/abc1", CLEAN)
        said = refused("replay", "abc1")
        assert "one/findings/abc1" in said and "two/findings/abc1" in said

    def test_the_start_of_an_id_is_enough(self, nf: Run, here: Path) -> None:
        kept(here / "narrowfuzz-runs/run/findings/abc123", CLEAN)
        kept(here / "narrowfuzz-runs/run/findings/def456", NO_BIAS)
        code, out, _ = nf("replay", "abc")
        assert code == 0 and "fixed" in out


def finding(case: Case) -> dict[str, Any]:
    """explain.json of a finding that no verdict of today has."""
    words = ("recipe", "oracle", "arm", "role", "symptom", "sentence", "strength")
    return dict.fromkeys(words, "x") | {
        "oracle": "O5",
        "arm": "eager",
        "id": case.id,
        "fingerprint": "O5--output--eager--wrong value--torch",
        "severity": "high",
        "reach": "gaussian",
        "case": json.loads(dump_case(case)),
        "minimal": json.loads(dump_case(case)),
        "flake": "always",
    }


def kept(folder: Path, case: Case, /, **fields: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "explain.json").write_text(json.dumps(finding(case) | fields))


def test_replay_of_a_divergence_says_still_failing(nf: Run, here: Path) -> None:
    (here / "case.json").write_bytes(dump_case(NO_BIAS))
    code, out, err = nf("replay", "case.json")
    assert (code, err) == (1, "")
    assert "still failing" in out and "torchao.mxfp8.rceil" in out and "bias" in out


def test_a_finding_of_an_older_campaign_is_replayed(nf: Run, here: Path) -> None:
    """Its case names what happened to a library's layers in the words of then."""
    events = [{"type": "open"}, {"type": "forward"}, {"type": "close"}]
    backward = {"type": "backward", "of": [0]}
    schedule = {"events": [*events, backward, {"type": "step"}], "checkpoint": "whole"}
    older = {"schema": 4, "data": {}, "spec": {"recipe": "reference.delayed", "schedule": schedule}}
    kept(here / "abc1", CLEAN, case=older, minimal=older, oracle="O14")
    code, out, err = nf("replay", "abc1")
    assert (code, err) == (0, "") and "fixed" in out and "eager+checkpoint" in out
    kept(here / "abc1", CLEAN, case=older, minimal=3, oracle="O14")
    assert nf("replay", "abc1")[0] == 2


def test_what_replays_say_is_listed(nf: Run, here: Path) -> None:
    """Beside the runs for a finding that lies there, in the database that is named for others."""
    assert nf("list", "findings")[1].strip() == "no run has recorded a finding"
    (here / "case.json").write_bytes(dump_case(NO_BIAS))
    name = json.loads(nf("replay", "case.json", "--json")[1])["fingerprint"]
    mine = "narrowfuzz-runs/1/findings/abc1"
    kept(here / mine, NO_BIAS, fingerprint=name, recipe=NO_BIAS.spec.recipe)
    assert nf("replay", mine)[0] == 1
    (one,) = json.loads(nf("list", "findings", "--json")[1])
    assert (one["state"], one["times_seen"]) == ("open", 2)  # by its run, and now
    assert nf("list", "findings", "--json", "--recipe", "torch.*")[1].strip() == "[]"
    nothing = nf("list", "findings", "--recipe", "torch.*")[1].strip()
    assert nothing == "no finding has such a recipe and arm"

    where = {"versions": versions(), "machine": machine().describe()}
    kept(here / "abc2", CLEAN, environment=where)
    assert nf("replay", "abc2")[0] == 0  # recorded nowhere
    assert len(json.loads(nf("list", "findings", "--json")[1])) == 1
    assert nf("replay", "abc2", "--database", "other.db")[0] == 0
    code, out, err = nf("list", "findings", "--database", "other.db")
    assert (code, err) == (0, "") and CLEAN.id in out and "1 fixed" in out
    assert "no file" in nf("list", "findings", "--database", "none.db")[2]

    kept(here / "abc3", CLEAN, environment=where, flake="flaky")  # chance may have it gone
    assert nf("replay", "abc3", "--database", "chance.db")[0] == 0
    assert json.loads(nf("list", "findings", "--json", "--database", "chance.db")[1]) == []


def test_replay_of_a_clean_case_says_sound(nf: Run, here: Path) -> None:
    (here / "case.json").write_bytes(dump_case(CLEAN))
    code, out, err = nf("replay", "case.json")
    assert (code, err) == (0, "")
    assert out.startswith("sound") and CLEAN.id in out and "eager" in out
    assert [path.name for path in here.iterdir()] == ["case.json"]


def test_replay_of_what_cannot_run_here_says_why(
    nf: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(here))
    assert unavailable(INDUCTOR)
    case = Case(spec=Spec(recipe="torch.fp32", dtype="fp32", compile="inductor"), data=DataSpec())
    (here / "case.json").write_bytes(dump_case(case))
    code, out, _ = nf("replay", "case.json")
    assert code == 125
    assert "cannot run here" in out and "g++" in out
    assert nf("replay", "case.json", "--arm", "eager*")[0] == 0


def test_replay_of_a_recipe_whose_library_is_absent_says_so(
    nf: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "torchao" else find_spec(name, *a),
    )
    (here / "case.json").write_bytes(dump_case(NO_BIAS))
    code, out, _ = nf("replay", "case.json")
    assert code == 125
    assert "pip install 'torchao>=" in out


@pytest.mark.parametrize("kind", KINDS)
def test_list_prints_every_kind(nf: Run, here: Path, kind: str) -> None:
    code, out, err = nf("list", kind)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) >= 2
    assert not list(here.iterdir())


def test_list_names_a_users_own_recipes(nf: Run, here: Path) -> None:
    (here / "mine.py").write_text(OWN)
    code, out, _ = nf("list", "recipes", "--recipe-file", "mine.py")
    assert code == 0
    assert "mine.fp32" in out and "torch.fp32" in out


OWN = """
import dataclasses
from narrowfuzz.recipe.recipe import load_recipes
RECIPES = [dataclasses.replace(load_recipes()["torch.fp32"], name="mine.fp32")]
"""


def test_doctor_prints_versions_policies_and_arms(nf: Run) -> None:
    code, out, _ = nf("doctor")
    assert code == 0
    for word in ("torch", "torchao", "e4m3fn finite overflow", "fp32 subnormals", "g++"):
        assert word in out
    assert all(arm.name in out for arm in LADDER)
    line = next(line for line in out.splitlines() if line.startswith("transformer_engine"))
    assert ("te.*" in line) == ("absent" in line)


def test_a_replay_breaks_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is no terminal, 80 columns are taken for one."""
    recipe = "a.recipe.with.a.name.of.which.a.line.of.eighty.columns.is.almost.full"
    print_replayed(Replayed("c", "still failing", recipe, "wrong", "O5", "eager", "f", recipe))
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4 and said[1].endswith("narrowfuzz rule O5")


def test_a_replay_says_what_came_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_replayed(Replayed("c", "diverges otherwise", "torch.bf16", "wrong", "O3", "eager"))
    assert capsys.readouterr().out.startswith("diverges otherwise now: wrong\n")
    print_replayed(Replayed("c", "cannot tell", reason="no verdict of O8"))
    assert capsys.readouterr().out == "cannot tell: no verdict of O8\n"


def test_a_replay_says_what_follows_from_a_cause(capsys: pytest.CaptureFixture[str]) -> None:
    follows = ("O5, O6 on output, eager", "O6 on grad_input, eager")
    print_replayed(
        Replayed("c", "still failing", "torch.bf16", "wrong", "O3", "eager", "f", "", follows)
    )
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "  consequences: O5, O6 on output, eager; O6 on grad_input, eager"


def test_an_operator_that_has_no_kernels_here_is_one_sentence(refused: Refused) -> None:
    sentence = refused("run", "--operator", "fp8_grouped_mm", "--minutes", "1")
    assert sentence == (
        "none of the chosen models can run here: fp8_grouped_rowwise: its kernels are Triton's, "
        "which a CPU interprets: --with triton==3.6.0"
    )
