"""Ranks: who made the bad value, whom it reached through which collective, who holds other bits,
who waits for whom."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import narrowfuzz
import pytest
import torch
from narrowfuzz_watch.merge import first_bad
from narrowfuzz_watch.read import read
from narrowfuzz_watch.records import Collective, Event, Held, Rank, Reached, Tensor
from narrowfuzz_watch.votes import collective_mismatch, stuck, votes

ROOT = Path(__file__).resolve().parents[2]


def event(rank: int, n: int, op: str, made: str = "made", **more: Any) -> Event:
    output = Tensor(name="output", dtype="float32", shape=(4,), nan=1, index=(2,))
    told: dict[str, Any] = {
        "step": 3, "time": float(n), "phase": "forward", "layer": "layers.0", "bad": "nan",
    }  # fmt: skip
    return Event(rank=rank, n=n, op=op, made=made, output=output, **{**told, **more})  # type: ignore[arg-type]


def part(rank: int, n: int, seq: int = 1, **more: Any) -> Collective:
    told: dict[str, Any] = {"step": 3, "op": "allreduce", "group": (0, 1, 2), "left": True}
    return Collective(rank=rank, n=n, seq=seq, **{**told, **more})


def crossed(rank: int, n: int) -> Event:
    return event(rank, n, "allreduce", "crossed", phase="collective", group=(0, 1, 2), seq=1)


def test_the_origin_is_the_rank_whose_operands_were_ordinary() -> None:
    ranks = [
        Rank(rank=0, events=[crossed(0, 9)], collectives=[part(0, 9, went="nan")]),
        Rank(
            rank=1, events=[event(1, 5, "aten.mm", again="clean")],
            collectives=[part(1, 8, came="bad", went="nan")],
        ),
        Rank(rank=2, events=[crossed(2, 7)], collectives=[part(2, 7, went="nan")]),
    ]  # fmt: skip
    found = first_bad(ranks)
    assert found is not None
    first, counts = found
    assert counts and (first.at.rank, first.at.name) == (1, "aten.mm")
    assert first.cause == "hardware or race"
    assert first.through is not None and first.through.group == (0, 1, 2)
    assert [one.rank for one in first.consequences] == [2, 0]


@pytest.mark.parametrize(
    ("went", "cause"),
    [
        (("nan", "nan", "nan"), "software or data"),
        (("ok", "nan", "ok"), "hardware or race"),
        (("nan", "nan"), "unknown"),
    ],
    ids=["overflow", "transport", "a rank is not known"],
)
def test_a_collective_itself_may_be_the_origin(went: tuple[Any, ...], cause: str) -> None:
    ranks = [
        Rank(
            rank=rank, collectives=[part(rank, 4, went=state)],
            events=[crossed(rank, 4)] if state == "nan" else [],
        )
        for rank, state in enumerate(went)
    ]  # fmt: skip
    found = first_bad(ranks)
    assert found is not None and found[0].at.phase == "collective" and found[0].cause == cause


def test_nan_of_an_infinity_leads_back_to_what_made_that() -> None:
    infinite = Tensor(name="self", dtype="float32", shape=(4,), inf=1, state="inf")
    made = event(0, 2, "aten.exp", bad="inf", again="same")
    after = event(0, 6, "aten.sub.Tensor", operands=(infinite,), again="same")
    found = first_bad([Rank(rank=0, events=[made, after])])
    assert found is not None and found[0].at.name == "aten.exp" and found[1]


def test_an_infinity_counts_once_it_has_reached_a_gradient() -> None:
    rank = Rank(rank=0, events=[event(0, 2, "aten.exp", bad="inf", again="same")])
    found = first_bad([rank])
    assert found is not None and not found[1]
    rank.reached.append(Reached(rank=0, step=3, name="w", bad="inf"))
    found = first_bad([rank])
    assert found is not None and found[1]


@pytest.mark.parametrize(
    ("digests", "sick"),
    [((5, 5, 7), (2,)), ((5, 6, 7), ()), ((5, 7), ()), ((5, 5, 5), None)],
    ids=["one of three", "no majority", "two", "all agree"],
)
def test_replicas_vote(digests: tuple[int, ...], sick: tuple[int, ...] | None) -> None:
    group = tuple(range(len(digests)))
    ranks = [
        Rank(rank=rank, held=[Held(rank=rank, step=4, held=(("norm.weight", group, digest),))])
        for rank, digest in enumerate(digests)
    ]
    found = votes(ranks, None)
    assert [vote.sick for vote in found] == ([] if sick is None else [sick])
    assert not votes(ranks, before=4)


def test_who_waits_and_who_never_came() -> None:
    ranks = [
        Rank(rank=0, collectives=[part(0, 3, 1), part(0, 9, 2, left=False)]),
        Rank(rank=1, collectives=[part(1, 3, 1), part(1, 9, 2, left=False)]),
        Rank(rank=2, collectives=[part(2, 3, 1)]),
    ]
    lines = stuck(ranks)
    assert len(lines) == 2 and "rank 0 has not left allreduce" in lines[0]
    assert "rank 2 never entered it: its last was allreduce 1" in lines[1]


def test_ranks_that_do_not_do_the_same() -> None:
    ranks = [
        Rank(rank=rank, collectives=[part(rank, 3, 1), part(rank, 5, 2, op=op)])
        for rank, op in enumerate(("allreduce", "allreduce", "broadcast"))
    ]
    assert "in their collective 2: rank 0: allreduce" in collective_mismatch(ranks)


def test_a_reduce_scatter_is_looked_at_once_it_has_written(tmp_path: Path) -> None:
    """gloo's copies its result in wait(), over what the memory held before."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    out = torch.empty(2)
    out.numpy()[:] = float("nan")  # no operator says that it is there
    try:
        with narrowfuzz.watch(out=tmp_path) as watched:
            torch.distributed.reduce_scatter_single(out, torch.ones(2))
            out.div_(2)
    finally:
        torch.distributed.destroy_process_group()
    assert watched.report is not None and watched.report.first is None
    (seen,) = read(tmp_path)[0].collectives
    assert seen.left and seen.went == "ok"


TRAINING = """
import os, signal, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(3):
    x = torch.randn(4, 8)
    loss = model(x).pow(2).mean()
    if rank == 1 and step == 1 and "nan" in sys.argv:
        loss = loss * torch.log(-loss)
    if rank == 1 and step == 2 and "flip" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()
    if rank == 1 and step == 0 and "flip" in sys.argv:
        model.module[0].weight.data.view(torch.int32)[0, 0] ^= 1
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def torchrun(tmp_path: Path, how: str) -> tuple[int, dict[str, Any]]:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "narrowfuzz", "watch", "--out", str(tmp_path / "run"), "--",
         *run, str(script), how],
        capture_output=True, check=False,
    )  # fmt: skip
    print(done.stderr.decode())  # shown if the test fails
    return done.returncode, json.loads((tmp_path / "run" / "first_bad.json").read_text())


def test_torchrun_with_a_bad_value_on_one_rank(tmp_path: Path) -> None:
    code, told = torchrun(tmp_path, "nan")
    first = told["first"]
    assert code == 0 and told["ranks"] == [0, 1] and told["steps"] == 3
    assert (first["at"]["rank"], first["at"]["event"], first["at"]["name"]) == (1, 2, "aten.log")
    assert first["through"]["op"] == "allreduce" and first["through"]["group"] == [0, 1]
    assert [one["rank"] for one in first["consequences"]] == [0]
    assert first["cause"] == "software or data"


@pytest.mark.heavy
def test_torchrun_with_a_flipped_bit_and_a_rank_that_dies(tmp_path: Path) -> None:
    code, told = torchrun(tmp_path, "flip")
    assert code != 0 and told["first"] is None
    (vote,) = told["votes"]
    assert (vote["group"], vote["sick"]) == ([0, 1], [])
    assert any("rank 1 never entered it" in line for line in told["stuck"]), told["stuck"]


@pytest.mark.heavy
def test_trials_name_rank_operator_and_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few of ``make watch-trials``, on four ranks as threads."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import watch_trials as trials

    trials.note_collectives()
    for number, lasting in enumerate((False, True)):
        put = trials.Put("nan", 2, 300, lasting)
        first = trials.trial(put, torch.bfloat16, tmp_path / str(number)).first
        assert trials.named(put, first) == ""
        assert first is not None
        assert first.cause == ("software or data" if lasting else "hardware or race")
