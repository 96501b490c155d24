"""A user's model, tried once: what it is like, or why it cannot be judged."""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from narrowfuzz.case import LARGEST
from narrowfuzz.own_models.source import Source, refused, said

if TYPE_CHECKING:
    import torch

_HOW = "it must return a module and what that is called with: a tensor, a tuple, or a dict by name"


@dataclass(frozen=True)
class Facts:
    """What a model is like, asked of it."""

    ids: bool
    random: bool
    linears: tuple[str, ...]
    #: Submodules that are recomputed one by one.
    blocks: tuple[str, ...]
    #: Fields of a Spec that it leaves no choice of.
    fixed: dict[str, Any]


def tried(source: Source) -> Facts:
    """Build it, call it twice, and see. Raises ValueError for what cannot be judged."""
    import torch
    from torch import nn

    from narrowfuzz.play.own import OwnModel, driven, imported

    refuse = partial(refused, source)
    try:
        torch.manual_seed(0)
        made = getattr(imported(source.where), source.build)(**dict(source.dims))
    except (Exception, SystemExit) as error:
        raise refuse(f"{source.build}() raised {said(error)}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise refuse(f"{source.build}() gives {_kind(made)}; {_HOW}")
    module, given = made
    values = given.values() if isinstance(given, dict) else given
    values = tuple(values) if not isinstance(values, torch.Tensor) else (values,)
    if not any(isinstance(value, torch.Tensor) for value in values):
        raise refuse(f"{source.build}() gives no tensor to call the model with; {_HOW}")
    elsewhere = {t.device.type for t in (*module.parameters(), *module.buffers())} - {"cpu"}
    if elsewhere:
        raise refuse(f"it is built on {', '.join(sorted(elsewhere))}: build it on the CPU, where "
                     "it goes from there is the run's business")  # fmt: skip
    linears = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    if not linears:
        raise refuse("it has no nn.Linear: there is nothing that a recipe would quantise")
    own = OwnModel(source.where, source.build, 1, 1, dict(source.dims))
    example = own.given[driven(own.given)]
    ids = not example.is_floating_point()
    if example.dim() == 0 or not example.numel():
        raise refuse(f"the tensor it is called with has shape {tuple(example.shape)}: it needs "
                     "rows and features")  # fmt: skip
    fixed = _sizes(example, ids)
    dtype = _dtype(next(iter(linears.values())).weight)
    if not dtype:
        kind = str(next(iter(linears.values())).weight.dtype).removeprefix("torch.")
        raise refuse(f"its first linear is {kind}: fp32, bf16 and fp16 can be judged")
    outputs = [_outputs(own, source, seed, refuse) for seed in (1, 2)]
    if _buffers(module) != _buffers(own.model):
        raise refuse(f"{source.build}() gives other buffers each time: seed what it draws")
    numel = sum(t.numel() for t in outputs[0])
    if not numel:
        raise refuse("it returns no tensor of floats: there is nothing to compare")
    tokens = fixed["m"] * (fixed["batch"] or 1)
    fixed["k" if ids else "n"] = math.ceil(numel / tokens)
    if ids:
        fixed["n"] = min(_vocabulary(module, example), LARGEST)
    largest = max(fixed["m"], fixed["k"], fixed.get("n", 1))
    if largest > LARGEST:
        raise refuse(
            f"it has {largest} rows or features in or out, and {LARGEST} is the most that is "
            "judged: build it with fewer tokens, less width or vocabulary"
        )
    fixed |= {
        "heads": 1,
        "attention": "flash",
        "bias": any(linear.bias is not None for linear in linears.values()),
        "dynamic": False,
        "dtype": dtype,
    }
    random = any(not torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    names = tuple(f"model.{name}".rstrip(".") for name in linears)
    return Facts(ids, random, names, _blocks(module), fixed)


def _outputs(own: Any, source: Source, seed: int, refuse: Any) -> list[torch.Tensor]:
    """What one call returns, with the random numbers of this seed."""
    import torch

    from narrowfuzz.play.own import tensors_in

    before = _buffers(own.model)
    args = copy.deepcopy([v for k, v in own.given.items() if isinstance(k, int)])
    kwargs = copy.deepcopy({k: v for k, v in own.given.items() if isinstance(k, str)})
    torch.manual_seed(seed)
    try:
        with torch.no_grad():
            found = tensors_in(own.model(*args, **kwargs))
    except Exception as error:
        called = f"calling it with what {source.build}() gives"
        raise refuse(f"{called} raised {said(error)}") from error
    after = _buffers(own.model)
    if changed := [name for name, then in after.items() if before.get(name) != then]:
        raise refuse(f"a forward changes its buffer {changed[0]}, so that no two runs are alike: "
                     "build it without running statistics, or in eval mode")  # fmt: skip
    return found


def _sizes(example: torch.Tensor, ids: bool) -> dict[str, Any]:
    """The example's shape as a Spec's: rows, features, and a batch where there are three sizes."""
    *rows, features = example.shape if not ids else (*example.shape, 1)
    if len(rows) == 2 and rows[0] <= 64:
        return {"batch": rows[0], "m": rows[1], "k": features}
    return {"batch": 0, "m": math.prod(rows), "k": features}


def _vocabulary(module: Any, example: torch.Tensor) -> int:
    """How many ids there are: what its smallest embedding holds."""
    from torch import nn

    tables = [m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)]
    return min(tables) if tables else int(example.max()) + 1


def _blocks(module: Any) -> tuple[str, ...]:
    """The blocks of the first list of modules: what training code recomputes one by one."""
    from torch import nn

    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) > 1:
            return tuple(f"model.{name}.{i}" for i in range(len(part)))
    return ()


def _dtype(weight: torch.Tensor) -> str:
    from narrowfuzz.play.dtypes import DTYPES

    names = {dtype: name for name, dtype in DTYPES.items()}
    return names.get(weight.dtype, "")


def _buffers(module: Any) -> dict[str, bytes]:
    """A hash of every buffer's bytes."""
    return {name: _hash(buffer) for name, buffer in module.named_buffers()}


def _hash(t: torch.Tensor) -> bytes:
    import torch

    raw = t.detach().reshape(-1).contiguous().view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).digest()


def _kind(made: Any) -> str:
    if isinstance(made, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in made) or 'nothing'}"
    return f"a {type(made).__name__}" if made is not None else "nothing"
