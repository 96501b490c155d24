"""Run torchtitan 0.1.0's own trainer on its llama3 debug model, on a CPU. Each rank does the same
as its ``train.py``, with a stand-in for the device module, which a CPU lacks, and with local text.

It runs as one process, or under torchrun, whose ranks share the parameters by FSDP. The last line
that it prints has the losses.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed
from torch.utils.data import IterableDataset

#: Environment variables of the single rank if torchrun has not started this process.
_ALONE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}  # fmt: skip
_TEXT = Path(__file__).resolve().parents[1] / "docs"


def train(steps: int, rows: int, length: int) -> list[float]:
    """The loss of every step, as the trainer logs it."""
    _on_cpu()
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config_manager import JobConfig
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
    from torchtitan.train import Trainer

    losses: list[float] = []

    class Noted(MetricsProcessor):  # type: ignore[misc]  # torchtitan is not there when mypy runs
        def log(self, step: int, loss: float, *more: Any) -> None:
            losses.append(loss)
            super().log(step, loss, *more)

    theirs = get_train_spec("llama3")
    register_train_spec(replace(
        theirs, name="llama3_bytes", build_dataloader_fn=_rows, build_metrics_processor_fn=Noted,
        build_tokenizer_fn=lambda job: SimpleNamespace(n_words=2000, eos_id=0),
    ))  # fmt: skip
    job = JobConfig()
    job.model.name, job.model.flavor = "llama3_bytes", "debugmodel"
    job.training.local_batch_size, job.training.seq_len = rows, length
    job.training.steps, job.training.seed = steps, 0
    job.lr_scheduler.warmup_steps = 2
    job.metrics.log_freq = 1
    with tempfile.TemporaryDirectory() as folder:
        job.job.dump_folder = folder
        trainer = Trainer(job)
        try:
            trainer.train()
        finally:
            trainer.close()
            distributed.destroy_process_group()
    return losses


def _on_cpu() -> None:
    """Import torchtitan with the CPU as its device, for which it asks torch once, at import."""
    nothing: Callable[..., None] = lambda *args: None  # noqa: E731
    device = SimpleNamespace(
        set_device=nothing, synchronize=nothing, empty_cache=nothing,
        reset_peak_memory_stats=nothing, current_device=lambda: 0, memory_stats=lambda device: {},
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: SimpleNamespace(total_memory=1),
    )  # fmt: skip
    with (
        patch.object(torch._utils, "_get_available_device_type", lambda: "cpu"),
        patch.object(torch._utils, "_get_device_module", lambda kind: device),
    ):
        import torchtitan  # noqa: F401


class _Rows(IterableDataset):  # type: ignore[type-arg]
    """Rows of text from this project's docs, one token per byte, at random positions from a seed
    that differs between ranks."""

    def __init__(self, length: int, seed: int) -> None:
        text = b"".join(file.read_bytes() for file in sorted(_TEXT.glob("*.md")))
        self.text, self.length, self.seed = torch.tensor([*text]), length, seed

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        draw = torch.Generator().manual_seed(self.seed)
        while True:
            begin = int(torch.randint(len(self.text) - self.length, (), generator=draw))
            row = self.text[begin : begin + self.length + 1]
            yield {"input": row[:-1]}, row[1:]


def _rows(*, dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> Any:
    from torchtitan.components.dataloader import ParallelAwareDataloader

    training = job_config.training
    data = _Rows(training.seq_len, dp_rank)
    return ParallelAwareDataloader(data, dp_rank, dp_world_size, training.local_batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=int)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update({name: os.environ.get(name, value) for name, value in _ALONE.items()})
    print("losses", *train(args.steps, args.rows, args.length), flush=True)


if __name__ == "__main__":
    main()
