"""Script text that makes a stateful case's tensors: a hash of seed, name and position."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from narrowfuzz.arms.events_data import gradient, model_input
from narrowfuzz.case import Case
from narrowfuzz.schedule.events import Backward, Forward
from narrowfuzz.stateful import ScheduleScript
from narrowfuzz.triage.script_training import gradient_name

_TENSOR = '''\
def tensor(name, *shape):
    """About normal values: a hash of the seed, the tensor's name and the position."""
    key = SEED * 0x9E3779B97F4A7C15 + (16 + zlib.crc32(name.encode())) * 0xD1B54A32D192ED03
    rows, cols = np.indices((int(np.prod(shape[:-1])), shape[-1]), dtype=np.uint64)
    h = (rows << 32 | cols) * 0x9E3779B97F4A7C15 + np.uint64(key % 2**64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h = (h ^ h >> 33) * factor
    h ^= h >> 29
    total = sum((h >> shift & 0xFFFF).astype(np.float64) for shift in (0, 16, 32, 48))
    return torch.from_numpy((total - 131070) * (1 / 37837)).reshape(shape)'''

_BUILD = """\
def build():
    layers = nn.ModuleList({made})
    {frozen}with torch.no_grad():
        for name, p in layers.named_parameters():
            x = tensor(name, *p.shape)
            p.copy_({filled})
    {built}return layers"""
_MATRIX = "x / 2 ** (p.shape[-1].bit_length() // 2)"
_ANY = f'{_MATRIX} if p.dim() > 1 else x / 4 if name.endswith("bias") else 1 + x / 8'


def tensors(case: Case, text: ScheduleScript) -> str:
    """Defines ``tensor`` and every input and gradient of the schedule, bit by bit as it ran."""
    lines = [_TENSOR.replace("SEED", str(case.data.seed)), *_stimuli(case, text)]
    return "\n".join(lines)


def build(case: Case, text: ScheduleScript, built: str) -> str:
    """Defines ``build()``: the layers with their parameters; ``built`` is done to each of them."""
    schedule = case.spec.schedule
    assert schedule is not None
    frozen = "layers[0].requires_grad_(False)\n    " if schedule.layout == "frozen_first" else ""
    made = f"[{text.layer}]"
    if schedule.layers > 1:
        made = f"\n        {text.layer}\n        for _ in range({schedule.layers})\n    "
    # parameters that are quantised as they are made are heard while there is no model yet
    none = "layers = nn.ModuleList()\n" if schedule.quantized_init else ""
    bare = schedule.layer == "linear" and not case.spec.bias
    return none + _BUILD.format(
        made=made,
        frozen=frozen,
        filled=_MATRIX if bare else _ANY,
        built=f"{built}\n    " if built else "",
    )


def _stimuli(case: Case, text: ScheduleScript) -> Iterator[str]:
    schedule, spec = case.spec.schedule, case.spec
    assert schedule is not None
    forwards = backwards = 0
    y = torch.zeros(spec.m, spec.k, dtype=_dtype(spec.dtype))
    for event in schedule.events:
        if isinstance(event, Forward):
            leaf = event.mode == "train" and schedule.layout != "frozen_first"
            x = model_input(case, forwards, event)
            name = f"x{forwards}"
            yield from _one(name, name, x, event, text, ".requires_grad_()" if leaf else "")
            forwards += 1
        elif isinstance(event, Backward):
            for f in event.of:
                g = gradient(case, backwards, f, event, y)
                name = gradient_name(backwards, f, event)
                yield from _one(name, f"g{backwards}/{f}", g, event, text, "")
            backwards += 1


def _one(
    variable: str,
    name: str,
    x: torch.Tensor,
    event: Forward | Backward,
    text: ScheduleScript,
    leaf: str,
) -> Iterator[str]:
    values = f'tensor("{name}", {", ".join(map(str, x.shape))})'
    if event.values == "zero":
        values = f"torch.zeros({', '.join(map(str, x.shape))})"
    elif event.shift:
        values += f" * 2.0**{event.shift}"
    last = "" if event.values in ("spike", "inf") else leaf
    wrapped = f"({values})" if " * " in values else values
    yield f"{variable} = {wrapped}.to(dtype){text.move}{last}"
    if event.values in ("spike", "inf") and x.numel():
        row, col = np.unravel_index(int(x.abs().argmax()), tuple(x.shape))
        value = float(x[row, col])
        yield f"{variable}[{row}, {col}] = {'math.inf' if value == np.inf else repr(value)}"
        if leaf:
            yield f"{variable}{leaf}"


def _dtype(name: str) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
