"""A user's own model: found, tried once, and made one of the models by name.

Its name in a case is that of its file and function, and a hash of the file. A case never makes a
file run: only who names it on the command line, or hands it to ``cases``, does.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowfuzz.case import LARGEST
from narrowfuzz.catalog import MODELS, Model
from narrowfuzz.own_dims import Dims, choices, combinations, size

if TYPE_CHECKING:
    import torch

_HOW = "it must return a module and what that is called with: a tensor, a tuple, or a dict by name"


@dataclass(frozen=True)
class Source:
    """Where a model's ``build`` is: a file, or a module by its dotted name."""

    where: str
    build: str
    #: Of the file's bytes.
    hash: str
    #: What it is called with where that is not the default.
    dims: Dims = ()

    @property
    def title(self) -> str:
        """As a user names it, without folders."""
        return f"{Path(self.where).name}:{self.build}"

    @property
    def name(self) -> str:
        called = f"({', '.join(f'{n}={v!r}' for n, v in self.dims)})" if self.dims else ""
        return f"{self.title}{called}#{self.hash}"


def source_of(text: str) -> Source:
    """What ``FILE.py:build`` or ``package.module:build`` names. Raises ValueError if there is no
    such file or module."""
    where, colon, build = text.rpartition(":")
    if not colon or not where or not build.isidentifier():
        raise ValueError(f"model {text!r}: write FILE.py:build or package.module:build")
    file = Path(where)
    if where.endswith(".py"):
        if not file.is_file():
            raise ValueError(f"model {text!r}: there is no file {where}")
        where = str(file.resolve())
    else:
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        try:
            found = importlib.util.find_spec(where)
        except ImportError as error:
            raise ValueError(f"model {text!r}: {error}") from None
        if found is None or found.origin is None:
            raise ValueError(f"model {text!r}: there is no module {where}")
        file = Path(found.origin)
    return Source(where, build, hashlib.sha256(file.read_bytes()).hexdigest()[:8])


@cache
def register(text: str) -> tuple[Model, ...]:
    """The model by this name, tried once, as it is by default and then as its parameters' other
    values make it; from now on they are among ``MODELS``.

    Raises ValueError, in one sentence, for what cannot be judged: a build that raises or gives no
    module, a model without a linear, one that does not run on a CPU, or whose buffers change.
    """
    source = source_of(text)
    values = _choices(source)
    sources = [replace(source, dims=dims) for dims in combinations(values)]
    sizes = {one.name: size(values, one.dims) for one in sources}
    models = tuple(_model(one, sizes) for one in sources)
    MODELS.update((model.name, model) for model in models)
    return models


def _choices(source: Source) -> dict[str, tuple[Any, ...]]:
    from narrowfuzz.play.own import imported

    try:
        build = getattr(imported(source.where), source.build, None)
    except (Exception, SystemExit) as error:
        raise _refused(source, f"importing it raised {_said(error)}") from error
    if not callable(build):
        raise _refused(source, f"there is no function {source.build} in it")
    try:
        return choices(build)
    except ValueError as error:
        raise _refused(source, f"{source.build} {error}") from None


def _model(source: Source, sizes: Mapping[str, float]) -> Model:
    facts, mine, dims = _tried(source), sizes[source.name], dict(source.dims)
    smaller = [name for name in sorted(sizes, key=sizes.__getitem__) if sizes[name] < mine]
    return Model(
        source.name, source.title, "OwnModel",
        lambda spec: (source.where, source.build, spec.tokens, spec.width, dims), "block",
        wide=not facts.ids, takes_ids=facts.ids, random=facts.random, attends=True,
        regions=facts.blocks, smaller=tuple(smaller), fixed=facts.fixed, own=True,
        linears=facts.linears, by_default=not source.dims,
    )  # fmt: skip


def known_as(name: str, text: str) -> Model:
    """The model of a case that was kept when its file was another: the file as it is now.

    Raises ValueError if it is of another file or function, or of other parameters than it has.
    """
    called = name.partition("#")[0]
    for model in register(text):
        if model.name.partition("#")[0] == called:
            MODELS[name] = model
            return model
    raise ValueError(f"the case is about the model {called}, not about {text}")


def _refused(source: Source, why: str) -> ValueError:
    return ValueError(f"model {source.name.partition('#')[0]}: {why}")


@dataclass(frozen=True)
class _Facts:
    """What a model is like, asked of it."""

    ids: bool
    random: bool
    linears: tuple[str, ...]
    #: Submodules that are recomputed one by one.
    blocks: tuple[str, ...]
    #: Fields of a Spec that it leaves no choice of.
    fixed: dict[str, Any]


def _tried(source: Source) -> _Facts:
    import torch
    from torch import nn

    from narrowfuzz.play.own import OwnModel, driven, imported

    refuse = partial(_refused, source)
    try:
        torch.manual_seed(0)
        made = getattr(imported(source.where), source.build)(**dict(source.dims))
    except (Exception, SystemExit) as error:
        raise refuse(f"{source.build}() raised {_said(error)}") from error
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
        "bias": False,
        "dynamic": False,
        "dtype": dtype,
    }
    random = any(not torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    names = tuple(f"model.{name}".rstrip(".") for name in linears)
    return _Facts(ids, random, names, _blocks(module), fixed)


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
        raise refuse(f"{called} raised {_said(error)}") from error
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


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
