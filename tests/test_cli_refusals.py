"""A mistake on the command line: exit code 2, one sentence, and nothing left behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from narrowfuzz.case.spec import MAX_CASE_BYTES, SCHEMA, Case, dump_case
from test_cli import CLEAN, Refused, Run, campaigns, here, nf, refused

__all__ = ["here", "nf", "refused"]  # fixtures


@pytest.mark.one_in(3)
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


@pytest.mark.one_in(9)
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


@pytest.mark.one_in(3)
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


@pytest.mark.one_in(3)
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


@pytest.mark.parametrize("command", ["check", "run --model"])
def test_a_users_model_that_ranks_cannot_train_is_refused(
    refused: Refused, command: str, tmp_path: Path
) -> None:
    """It was a run of no case, that ended with 0."""
    (file := tmp_path / "alone.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.ones(4, 8)\n"
    )
    said = refused(*command.split(), f"{file}:build", "--recipe", "torch.fp32", "--arm", "sharded*")
    assert said.endswith("it draws random numbers, and each rank draws others")


def test_an_arm_that_none_of_the_models_can_run_on_is_refused(refused: Refused) -> None:
    said = refused(*("run", "--model", "dropout", "--recipe", "torch.fp32", "--arm", "sharded"))
    assert "torch.fp32 cannot run dropout that way; leave --arm out" in said


def test_an_operator_that_has_no_kernels_here_is_one_sentence(refused: Refused) -> None:
    sentence = refused("run", "--operator", "fp8_grouped_mm", "--minutes", "1")
    assert sentence == (
        "none of the chosen models can run here: fp8_grouped_rowwise: its kernels are Triton's, "
        "which a CPU interprets: --with triton==3.6.0"
    )
