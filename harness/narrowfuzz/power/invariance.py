"""Measures whether a row by itself gives the same bits as within a batch. If it does not, that is a
property of a backend and not a bug: PyTorch's note on numerical accuracy ("Batched computations or
slice computations") promises nothing.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from rich.table import Table

from narrowfuzz.arms.available import options_on, unavailable
from narrowfuzz.arms.census import converted_by
from narrowfuzz.case.arm import Arm
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import Spec
from narrowfuzz.machine.device import check_device, enter
from narrowfuzz.machine.environment import prepare
from narrowfuzz.play.dtypes import DTYPES
from narrowfuzz.play.kernels import without_onednn
from narrowfuzz.recipe.recipe import Recipe, load_recipes, obstacles, select, unknown
from narrowfuzz.report import terminal

#: Rows of the whole batch, and of the parts that are tried, each taken from its start and its end.
BATCH, PARTS = 64, (1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33, 63)
#: (in, out) features of linears, multiples of all block sizes that recipes need; and row widths of
#: other operators, the last not a multiple of a SIMD vector.
_LINEAR, _WIDTHS = ((256, 128), (64, 256)), (64, 200, 1021)
#: Attention shapes of one row: (heads, tokens, head width).
_SEQUENCES = ((2, 24, 16), (1, 70, 64))
#: Factor for all rows but the first, so that they dwarf it.
_HUGE = {"fp32": 2.0**60, "bf16": 2.0**60, "fp16": 2.0**8}
#: A function of [rows, ...] to [rows, ...].
Call: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Measured:
    """The measurement of one operator with one backend, dtype and shape."""

    operator: str
    backend: str
    dtype: str
    #: Shape of one row; (in, out) features of a linear.
    shape: tuple[int, ...]
    #: The fewest rows from which on every part has the bits of the batch; 0: none has.
    equal_from: int = 0
    #: The largest difference, relative to the largest magnitude of the result.
    differs: float = 0.0
    #: True if a row's result depends on the values of the other rows; on the batch's layout in
    #: memory; on the number of torch's threads.
    others: bool = False
    layout: bool = False
    threads: bool = False
    #: Why nothing could be measured, "" if it was.
    problem: str = ""

    @property
    def alone(self) -> bool:
        """True if a row by itself has the bits that it has in the batch, whatever the other rows
        are."""
        return self.equal_from == 1 and not self.others


def measured(
    recipes: Sequence[Recipe], operators: Sequence[str], arm: Arm, device: str
) -> Iterator[Measured]:
    """Measure every operator that one of the globs matches (all without globs): linears as the
    recipes convert them, and torch's other operators. Raises ValueError for a glob that matches
    nothing, and for an arm on which no single operator runs here."""
    if arm.checkpoint or arm.sharded:
        raise ValueError(f"--arm {arm.name}: a single operator is neither recomputed nor sharded")
    if why := unavailable(arm, device):
        raise ValueError(f"--arm {arm.name}: {why}")
    names = ("linear", *_OTHERS)
    for glob in operators:
        if not fnmatch.filter(names, glob):
            raise ValueError(unknown("operator", glob, dict.fromkeys(names)))
    chosen = [n for n in names if not operators or any(fnmatch.fnmatch(n, g) for g in operators)]
    for name in chosen:
        if name == "linear":
            yield from _linears(recipes, arm, device)
            continue
        sizes = _SEQUENCES if name == "attention" else tuple((width,) for width in _WIDTHS)
        for dtype in DTYPES:
            for shape in sizes:
                about = Measured(name, "torch", dtype, shape)
                yield measure(about, partial(_plain, _OTHERS[name]), arm, device)


def _linears(recipes: Sequence[Recipe], arm: Arm, device: str) -> Iterator[Measured]:
    for recipe in recipes:
        lacking = obstacles(recipe, device)
        for backend in recipe.backends or ("",):
            if backend in lacking:
                continue
            for k, n in _LINEAR:
                for dtype in recipe.dtypes:
                    spec = Spec(recipe=recipe.name, backend=backend, m=BATCH, k=k, n=n, dtype=dtype)
                    about = Measured("linear", f"{recipe.name} {backend}".strip(), dtype, (k, n))
                    yield measure(about, partial(_converted, recipe, spec), arm, device)


def _converted(recipe: Recipe, spec: Spec, dtype: torch.dtype, device: str) -> Call:
    """A linear of the Spec's shape, as the recipe converts it."""
    layer = torch.nn.Linear(spec.k, spec.n, bias=False, device=device, dtype=dtype)
    model = torch.nn.Sequential(layer)
    converted: Call = converted_by(recipe, model, spec)
    return converted


def _plain(call: Call, dtype: torch.dtype, device: str) -> Call:
    return call


def _attention(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def _over_features(function: Any) -> Call:
    return lambda x: function(x, (x.shape[-1],))


#: Torch's other operators, by name.
_OTHERS: Mapping[str, Call] = {
    "attention": _attention,
    "layer_norm": _over_features(F.layer_norm),
    "rms_norm": _over_features(F.rms_norm),
    "softmax": partial(torch.softmax, dim=-1),
    "log_softmax": partial(torch.log_softmax, dim=-1),
    "sum": partial(torch.sum, dim=-1),
    "silu": F.silu,
    "gelu": F.gelu,
}


def measure(
    about: Measured, make: Callable[[torch.dtype, str], Call], arm: Arm, device: str
) -> Measured:
    """Measure one row of the table; an error of the call becomes its ``problem``."""
    width = about.shape[:1] if about.operator == "linear" else about.shape
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x = torch.randn(BATCH, *width, generator=generator).to(device, DTYPES[about.dtype])
    try:
        with torch.no_grad(), _kernels_of(arm):
            call = _on_arm(make(DTYPES[about.dtype], device), arm, device)
            return _compared(about, call, x)
    except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
        problem = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Measured(about.operator, about.backend, about.dtype, about.shape, problem=problem)


@contextmanager
def _kernels_of(arm: Arm) -> Iterator[None]:
    """Disable oneDNN if the arm does. On a compiled arm, raise Dynamo's recompile limit: every
    number of rows is compiled anew, and Dynamo gives up after a few."""
    with ExitStack() as stack:
        if arm.native:
            stack.enter_context(without_onednn())
        if arm.compiler:
            torch.compiler.reset()
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=8 * len(PARTS)))
        yield


def _on_arm(call: Call, arm: Arm, device: str) -> Call:
    if not arm.compiler:
        return call
    compiled: Call = torch.compile(
        call, backend=arm.compiler, dynamic=False, options=options_on(arm, device) or None
    )
    return compiled


def _compared(about: Measured, call: Call, x: torch.Tensor) -> Measured:
    whole = call(x)
    unlike = [m for m in PARTS if not _parts_equal(call, x, whole, m)]
    equal = [m for m in PARTS if m > max(unlike, default=0)]
    parts = [call(x[:m]) - whole[:m] for m in unlike] + [call(x[-m:]) - whole[-m:] for m in unlike]
    size = whole.abs().max().item() or 1.0
    return Measured(
        about.operator,
        about.backend,
        about.dtype,
        about.shape,
        equal_from=equal[0] if equal else 0,
        differs=max((part.abs().max().item() / size for part in parts), default=0.0),
        others=any(_others_matter(call, x, whole, factor) for factor in (_HUGE[about.dtype], 0.0)),
        layout=not _same(call(x.transpose(0, -1).contiguous().transpose(0, -1)), whole),
        threads=not _same(_with_threads(call, x), whole),
    )


def _parts_equal(call: Call, x: torch.Tensor, whole: torch.Tensor, rows: int) -> bool:
    return _same(call(x[:rows]), whole[:rows]) and _same(call(x[-rows:]), whole[-rows:])


def _others_matter(call: Call, x: torch.Tensor, whole: torch.Tensor, factor: float) -> bool:
    return not _same(call(torch.cat([x[:1], x[1:] * factor]))[:1], whole[:1])


def _with_threads(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Call with another number of threads: two if torch has one, else one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2 if before == 1 else 1)
    try:
        return call(x)
    finally:
        torch.set_num_threads(before)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if both are equal bit for bit, except for the sign of zeros."""
    return torch.equal(a, b)


def measure_requested(
    globs: Sequence[str], operators: Sequence[str], arm: str, device: str, files: Sequence[Path]
) -> list[Measured]:
    """The measurements that ``narrowfuzz invariance`` requests. Raises ValueError for an unknown
    name."""
    if arm not in BY_NAME:
        raise ValueError(unknown("arm", arm, BY_NAME))
    check_device(device)
    prepare()
    entered = enter(device)
    recipes = select(load_recipes(files), globs or ("torch.*", "torchao.*"))
    return list(measured(tuple(recipes.values()), operators, BY_NAME[arm], entered.torch))


def print_table(rows: Sequence[Measured]) -> None:
    """Print a table, and a sentence that explains it."""
    table = Table(box=None, pad_edge=False)
    how = ("same bits", "differs by", "depends on")
    for title in ("operator", "backend", "dtype", "row shape", *how):
        table.add_column(title, overflow="fold")
    for row in rows:
        shape = " x ".join(map(str, row.shape))
        table.add_row(row.operator, row.backend, row.dtype, shape, *_cells(row))
    unchanged = sum(row.alone for row in rows)
    terminal.print_table(
        table,
        f"{unchanged} of {len(rows)}: a row alone has the bits that it has in a batch of {BATCH}, "
        "whatever stands beside it. PyTorch promises this of no operator; where it does not hold, "
        "the same sample gives another result in another batch.",
    )


def _cells(row: Measured) -> tuple[str, str, str]:
    """Words for the columns: from how many rows on the bits are equal, by how much they differ
    otherwise, and what else the result depends on."""
    if row.problem:
        return "not measured", "", row.problem
    equal = f"from {row.equal_from} rows on" if row.equal_from > 1 else "always"
    if row.others or not row.equal_from:  # parts with the batch's largest value agree by chance
        equal = "no"
    named = {"other rows": row.others, "layout": row.layout, "threads": row.threads}
    depends = ", ".join(name for name, so in named.items() if so)
    differs = f"{row.differs:.1e}" if row.equal_from != 1 else ""
    return equal, differs, depends
