"""Which rungs a Spec climbs, what they are called and what they promise."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
from narrowfuzz.arms import available
from narrowfuzz.arms.available import natives, rungs_of, select_arms, unavailable
from narrowfuzz.case.arm import EAGER, EAGER_NATIVE, INDUCTOR, Compile, with_checkpoint
from narrowfuzz.case.ladder import BY_NAME, LADDER, base_of, climb
from narrowfuzz.case.sharding import UNSHARDED, Sharding
from narrowfuzz.case.spec import AnyCheckpoint, Checkpoint, Kernels, Spec

SUFFIX = {
    "none": "",
    "full": "+checkpoint",
    "reentrant": "+checkpoint_reentrant",
    "selective": "+checkpoint_selective",
}
#: What only a library's own layers climb.
OF_LIBRARY = ("eager+checkpoint_by_torch", "eager+checkpoint_by_torch_reentrant")
OF_LIBRARY_ON_RANKS = tuple(name.replace("eager", "sharded_processes") for name in OF_LIBRARY)
#: Written down anew: what each value of ``compile`` runs besides eager.
STAGES = {
    "none": [],
    "aot_eager": ["aot_eager"],
    "aot_eager_decomp_partition": ["aot_eager_decomp_partition"],
    "inductor": ["aot_eager", "inductor_strict", "inductor"],
}
COMBINATIONS = list(itertools.product(get_args(Compile), get_args(Checkpoint)))


@pytest.mark.parametrize(("compiler", "checkpoint"), COMBINATIONS)
def test_a_spec_climbs_eager_its_recompute_then_the_compiled_stages(
    compiler: Compile, checkpoint: Checkpoint
) -> None:
    spec = Spec(recipe="torch.fp32", compile=compiler, checkpoint=checkpoint)
    suffix = SUFFIX[checkpoint]
    recomputed = [f"eager{suffix}"] if suffix else []
    assert [arm.name for arm in climb(spec)] == [
        "eager",
        *recomputed,
        *(stage + suffix for stage in STAGES[compiler]),
    ]


@pytest.mark.parametrize(("compiler", "checkpoint"), COMBINATIONS)
def test_rungs_come_in_the_ladders_order_and_are_the_ladders_own(
    compiler: Compile, checkpoint: Checkpoint
) -> None:
    """The first rung that differs is the guilty one only if cheaper ones come before."""
    rungs = climb(Spec(recipe="torch.fp32", compile=compiler, checkpoint=checkpoint))
    places = [LADDER.index(arm) for arm in rungs]
    assert places == sorted(set(places))


@pytest.mark.parametrize("checkpoint", get_args(Checkpoint))
@pytest.mark.parametrize(
    ("kernels", "stages"),
    [
        ("default", ["eager"]),
        ("both", ["eager", "eager_native"]),
        ("native", ["eager_native"]),
    ],
)
def test_whose_kernels_multiply_is_a_rung_of_its_own(
    kernels: Kernels, stages: list[str], checkpoint: Checkpoint
) -> None:
    spec = Spec(recipe="torch.fp32", kernels=kernels, checkpoint=checkpoint)
    rungs = climb(spec)
    suffixes = dict.fromkeys(("", SUFFIX[checkpoint]))
    assert [arm.name for arm in rungs] == [s + suffix for s in stages for suffix in suffixes]
    assert [LADDER.index(arm) for arm in rungs] == sorted(LADDER.index(arm) for arm in rungs)
    assert base_of(spec) is rungs[0]


@pytest.mark.parametrize("kernels", get_args(Kernels))
def test_what_is_compiled_is_compared_with_onednns_kernels(kernels: Kernels) -> None:
    spec = Spec(recipe="torch.fp32", kernels=kernels, compile="inductor")
    assert base_of(spec) is EAGER and EAGER in climb(spec)


def test_every_rung_but_the_reference_is_climbed_by_some_spec() -> None:
    climbed = {
        arm.name
        for c, k in COMBINATIONS
        for on in (UNSHARDED, Sharding(data=2), Sharding(context=2))
        for arm in climb(Spec(recipe="r", compile=c, checkpoint=k, kernels="both", sharding=on))
    }
    assert climbed == {arm.name for arm in LADDER[1:]}
    assert LADDER[0].name == "reference"


def test_names_are_unique_and_tell_stage_and_checkpoint() -> None:
    assert len(LADDER) == 41 and len({arm.name for arm in LADDER}) == 41
    assert BY_NAME.keys() - {arm.name for arm in LADDER} == {*OF_LIBRARY, *OF_LIBRARY_ON_RANKS}
    for arm in LADDER[1:]:
        assert arm.name == arm.stage + SUFFIX[arm.checkpoint or "none"]
        assert "+" not in arm.stage and arm.stage in BY_NAME
        eager = ("eager", "eager_native", "sharded", "sharded_processes", "sharded_context")
        assert (arm.stage in eager) == (arm.compiler == "")
        assert arm.sharded == arm.stage.startswith("sharded")
        assert arm.native == (arm.stage == "eager_native")


@pytest.mark.parametrize("checkpoint", [c for c in SUFFIX if c != "none"])
def test_a_checkpoint_changes_nothing_of_the_stage_but_what_it_recomputes(checkpoint: str) -> None:
    arm = with_checkpoint(INDUCTOR, checkpoint)
    assert (arm.compiler, arm.options, arm.fuses) == ("inductor", (), "chains")
    assert (arm.stage, arm.checkpoint) == ("inductor", checkpoint)
    assert arm.title != INDUCTOR.title and with_checkpoint(INDUCTOR, "none") is INDUCTOR


def test_only_code_that_inductor_writes_may_leave_roundings_out() -> None:
    fusing = {arm.stage: arm.fuses for arm in LADDER if arm.fuses}
    assert fusing == {"inductor": "chains", "inductor_strict": "bias"}
    assert all(arm.fuses == fusing.get(arm.stage, "") for arm in LADDER)
    decomposed = {"aot_eager_decomp_partition", *fusing}
    assert all(arm.reorders == (arm.stage in decomposed) for arm in LADDER)
    assert all(arm.compiled == bool(arm.compiler) for arm in LADDER)


def test_a_librarys_own_layers_climb_eager_and_their_own_checkpoint() -> None:
    def names(checkpoint: AnyCheckpoint) -> list[str]:
        spec = Spec(recipe="reference.delayed", model="library_linear", checkpoint=checkpoint)
        return [arm.name for arm in climb(spec)]

    assert names("none") == ["eager"]
    found = [
        name
        for checkpoint in ("full", "reentrant", "by_torch", "by_torch_reentrant")
        for name in names(checkpoint)[1:]
    ]
    assert len(found) == 4
    assert set(found) == {"eager+checkpoint", "eager+checkpoint_reentrant", *OF_LIBRARY}
    assert all(BY_NAME[name].recomputes and BY_NAME[name].stage == "eager" for name in found)


def test_the_strict_rung_keeps_eagers_casts_and_the_users_rung_has_no_options() -> None:
    assert dict(BY_NAME["inductor_strict"].options) == {"emulate_precision_casts": True}
    assert [arm.stage for arm in LADDER if arm.options] == ["inductor_strict"] * 4


@pytest.mark.parametrize(
    ("globs", "stages"),
    [
        ([], {arm.stage for arm in LADDER}),
        (["eager*"], {"eager", "eager_native"}),
        (["*+checkpoint"], {arm.stage for arm in LADDER} - {"reference"}),
    ],
)
def test_globs_choose_rungs(globs: list[str], stages: set[str]) -> None:
    assert {BY_NAME[name].stage for name in select_arms(globs)} == stages


def test_a_glob_that_matches_nothing_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'inductor_strict'"):
        select_arms(["inductor_strickt"])


@pytest.mark.parametrize(
    ("arms", "rungs"),
    [
        ({"eager"}, ("none",)),
        ({"eager+checkpoint_selective"}, ("none",)),
        ({"eager_native"}, ("none",)),
        ({"aot_eager"}, ("aot_eager",)),  # without a slice of eager's own
        ({"eager", "aot_eager_decomp_partition"}, ("none", "aot_eager_decomp_partition")),
        ({"inductor_strict"}, ("inductor",)),
        ({"inductor+checkpoint"}, ("inductor",)),
        ({"reference"}, ("none",)),
    ],
)
def test_chosen_arms_say_which_rungs_a_campaign_takes(
    monkeypatch: pytest.MonkeyPatch, arms: set[str], rungs: tuple[str, ...]
) -> None:
    monkeypatch.setattr(available, "unavailable", lambda arm, device: "")
    assert rungs_of(arms) == rungs


#: PyTorch has no context parallelism for CPUs.
NO_CPUS = {"sharded_context"}


def test_where_onednn_cannot_be_switched_off_its_absence_is_no_rung(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert natives(BY_NAME, "cpu") and not natives({"eager"}, "cpu")
    assert not natives(BY_NAME, "cuda")
    monkeypatch.setattr(available, "onednn_stays", lambda: "oneDNN stays")
    assert {arm.stage for arm in LADDER if unavailable(arm)} == {"eager_native", *NO_CPUS}
    assert unavailable(EAGER_NATIVE) == "oneDNN stays" and not natives(BY_NAME, "cpu")


def test_without_a_compiler_for_cpu_code_only_inductors_rungs_are_out_of_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(available.shutil, "which", lambda name: None)
    lacking = {arm.stage for arm in LADDER if unavailable(arm)}
    assert lacking == {"inductor", "inductor_strict", *NO_CPUS}
    assert "install g++" in unavailable(INDUCTOR) and not unavailable(EAGER)
    assert rungs_of({"inductor"}) == ("none",)
    assert rungs_of(BY_NAME) == ("none", "aot_eager", "aot_eager_decomp_partition")
