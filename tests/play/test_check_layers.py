"""What scripts ask of a schedule's run: each check has something that it sees and something that it
leaves alone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from narrowfuzz.arms.event_records import see_cast
from narrowfuzz.numerics.formats import CastRounding
from narrowfuzz.play.check_layers import (
    in_time,
    left_over,
    maxima,
    not_made,
    other_bits,
    other_blocks,
    other_formats,
    recomputed_with,
    record_linear_tensors,
    seen_at,
    weight_not_cast,
    wrong_casts,
)
from narrowfuzz.play.job import Job, Layers, Taps
from narrowfuzz.play.library import Cast, Product, Side, Where, copied, play_layers
from narrowfuzz.play.player import Trace
from narrowfuzz.trace.address import Phase
from narrowfuzz.trace.snapshots import ExecutionPoint

FORWARD, BACKWARD = Where("forward", 0, 0), Where("backward")
ONE = torch.ones(())
X = torch.tensor([[1.0, -2.0, 700.0, math.nan]])


def cast(x: torch.Tensor, scale: float, slot: Any = None, largest: float = 448.0) -> Cast:
    codes = (x * scale).clamp(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8)
    return Cast(slot, x, codes, torch.tensor(scale), "e4m3")


def blocks(x: torch.Tensor, byte: int) -> Cast:
    codes = (x * 2.0 ** (127 - byte)).to(torch.float8_e4m3fn).view(torch.uint8)
    return Cast(None, x, codes, torch.full((len(x), 1), byte, dtype=torch.uint8), "e4m3")


ROW = torch.cat([torch.full((1, 31), 1.0), torch.full((1, 1), 3.0)], 1)


@pytest.mark.parametrize(
    ("kind", "seen", "shows"),
    [
        ("delayed", cast(X, 0.5), False),
        ("delayed", cast(X, 0.5, largest=1.0), True),
        ("current", cast(X, 448.0 / 700.0), False),
        ("current", cast(X, 0.5), True),
        ("current", cast(torch.zeros(1, 4), 1.0), False),
        ("mx", blocks(ROW, 120), False),  # 3 * 2^7 = 384 fits, 3 * 2^8 does not
        ("mx", blocks(ROW, 121), True),
        ("mx", blocks(ROW, 120)._replace(codes=blocks(ROW, 121).codes), True),
    ],
)
def test_casts_are_held_to_the_definition(kind: str, seen: Cast, shows: bool) -> None:
    told, shown = wrong_casts([seen], kind=kind)
    assert shown is shows, told


def squares(x: torch.Tensor, block: tuple[int, int], scales: torch.Tensor) -> Cast:
    """As TransformerEngine's FP8 block scaling casts, with these scales of blocks."""
    spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    codes = (x * spread[: len(x), : x.shape[1]]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return Cast(None, x, codes.view(torch.uint8), scales, "e4m3")


BLOCKS = [(1, 128), (128, 1), (128, 128)]


def of_squares(block: tuple[int, int]) -> Cast:
    """Of a complete and an incomplete block along each dimension that blocks have; the last holds
    nothing but zeros and NaN."""
    x = torch.full((130, 140), 3.0)
    x[128:, 128:] = 0.0
    x[129, 139] = math.nan
    rows, columns = (-(-n // size) for n, size in zip(x.shape, block, strict=True))
    scales = torch.full((rows, columns), 128.0)  # 3 * 2^7 = 384 fits, 3 * 2^8 does not
    scales[128 // block[0] :, 128 // block[1] :] = 1.0
    return squares(x, block, scales)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_scales_of_fp8_blocks_are_powers_of_two_at_which_their_block_fits(
    block: tuple[int, int],
) -> None:
    seen = of_squares(block)
    told, shows = wrong_casts([seen], kind="block")
    assert not shows and see_cast(seen, ExecutionPoint("forward")).wrong is None, told
    for change in (0.5, 2.0, 1.5):
        scales = seen.scale.clone()
        scales[-1, 0] *= change
        other = squares(seen.input, block, scales)
        wrong = see_cast(other, ExecutionPoint("forward")).wrong
        assert wrong is not None and (wrong.what, wrong.want) == ("scale", 128.0)
        assert wrong_casts([other], kind="block")[1]
    codes = seen.codes.clone()
    codes[127, 127] ^= 1
    wrong = see_cast(seen._replace(codes=codes), ExecutionPoint("forward")).wrong
    assert wrong is not None and (wrong.what, wrong.place) == ("codes", (127, 127))
    assert wrong_casts([seen._replace(codes=codes)], kind="block")[1]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_operands_have_a_scale_for_each_block(block: tuple[int, int]) -> None:
    seen = of_squares(block)
    made = Side(seen.codes, 1 / seen.scale, "e4m3")
    products = [Product("output", made, Side(X, None, "bf16"))]
    assert not other_blocks(products, "a", block)[1] and not other_blocks(products, "b", block)[1]
    assert all(other_blocks(products, "a", other)[1] for other in BLOCKS if other != block)


def test_blocks_across_rows_are_blocks_of_columns() -> None:
    along = blocks(ROW, 120)
    across = Cast(None, ROW.t(), along.codes.t().contiguous(), along.scale.t(), "e4m3")
    assert not wrong_casts([across], kind="mx")[1]
    assert wrong_casts([across._replace(scale=across.scale + 1)], kind="mx")[1]


def product(a: Cast, inverse: Any) -> Product:
    side = Side(a.codes, inverse, "e4m3")
    return Product("output", side, side)


def test_an_operand_is_what_one_of_its_casts_made() -> None:
    made, other = cast(X, 0.5), cast(X, 0.25)
    fit = product(made, torch.tensor([2.0]))
    assert not not_made([fit], "a", [other, made], own=True)[1]
    turned = fit._replace(a=fit.a._replace(codes=fit.a.codes.t()))
    assert not not_made([turned], "a", [made], own=True)[1]
    assert not_made([product(made, torch.tensor([4.0]))], "a", [made], own=True)[1]
    assert not_made([fit], "a", [other], own=True)[1]
    assert not not_made([fit], "a", [other], own=False)[1]
    high = Product("output", *[Side(X, None, "bf16")] * 2)
    assert not not_made([high], "a", [], own=True)[1]


def test_what_is_cast_too_late_makes_no_operand() -> None:
    early, late = cast(X, 0.5, ("0", "backward", 0)), cast(X, 0.5, ("0", "forward", 0))
    run = Trace(recorded=[(3, BACKWARD, early), (3, BACKWARD, late)])
    assert in_time(run, {(3, BACKWARD)}) == [early]
    assert seen_at(run, Cast, {(3, BACKWARD)}) == [early, late]
    assert not seen_at(run, Product, {(3, BACKWARD)}) and not seen_at(run, Cast, {(2, BACKWARD)})


def test_a_recompute_multiplies_what_its_forward_did() -> None:
    first = product(cast(X, 0.5), torch.tensor([2.0]))
    assert not recomputed_with([first, first], [first])[1]
    assert recomputed_with([product(cast(X, 0.25), torch.tensor([4.0]))], [first])[1]
    assert recomputed_with([product(cast(-X, 0.5), torch.tensor([2.0]))], [first])[1]
    high = Product("output", *[Side(X, None, "bf16")] * 2)
    assert recomputed_with([high], [first])[1] and recomputed_with([first], [])[1]
    assert not recomputed_with([high], [high])[1]


def test_products_have_the_formats_that_are_due() -> None:
    narrow = Product("output", Side(X, ONE, "e4m3"), Side(X, ONE, "e5m2"))
    high = Product("output", Side(X, None, "bf16"), Side(X, None, "bf16"))
    assert not other_formats([narrow], ("e4m3", "e5m2"))[1]
    assert other_formats([narrow], ("e4m3",))[1] and other_formats([narrow], ())[1]
    assert not other_formats([high], ())[1] and other_formats([high], ("e4m3",))[1]


def test_a_forward_casts_its_weight() -> None:
    weight = cast(X, 1.0, ("0", "forward", 1))
    run = Trace(recorded=[(2, FORWARD, weight), (4, BACKWARD, weight)])
    assert not weight_not_cast(run, 2)[1]
    run.recorded.append((5, FORWARD, cast(X, 1.0, ("0", "forward", 0))))
    assert weight_not_cast(run, 5)[1]
    assert not weight_not_cast(run, 3)[1]  # where no slot is known nothing is missing


def test_between_steps_nothing_is_left() -> None:
    assert left_over({"regions": 0}) == ("left over: nothing", False)
    assert left_over({"regions": 0, "scales": 2}) == ("left over: {'scales': 2}", True)


def test_two_runs_are_compared_bit_by_bit() -> None:
    held = (ONE, torch.tensor([0.0, math.nan]))
    assert not other_bits(held, (ONE.clone(), held[1].clone()))[1]
    assert other_bits(held, (ONE, torch.tensor([0.0, 1.0])))[1]
    assert other_bits(X, torch.ones(2))[1] and other_bits(None, X)[1]
    assert other_bits(torch.tensor(math.inf), torch.tensor(3.0e38))[1]


def test_the_tensors_that_a_linear_quantises_are_recorded() -> None:
    layers = torch.nn.ModuleDict({"0": torch.nn.Linear(4, 2, bias=False)})
    recorded: list[Cast] = []
    x = torch.ones(3, 4, requires_grad=True)
    with record_linear_tensors(layers, recorded.append):
        layers["0"](x).backward(2 * torch.ones(3, 2))
    layers["0"](x)
    assert [seen.slot for seen in recorded] == [
        ("0", "forward", 0), ("0", "forward", 1), ("0", "backward", 0),
    ]  # fmt: skip
    assert torch.equal(recorded[2].input, 2 * torch.ones(3, 2))


def test_maxima_are_those_of_a_slot_and_of_no_recompute() -> None:
    slot = ("0", "forward", 0)
    again = Where("recompute", 0, 0)
    run = Trace(states=[{}, {}])
    run.recorded = [(0, FORWARD, cast(X, 0.5, slot)), (1, again, cast(X, 0.5, slot))]
    assert maxima(run, slot, scales=True) == [[(700.0, 0.5)], []]
    assert maxima(run, ("0", "forward", 1), scales=False) == [[], []]


def test_what_is_kept_is_a_copy() -> None:
    seen = product(cast(X, 0.5), torch.tensor([2.0]))
    held = copied(seen)
    assert type(held) is Product and type(held.a) is Side and held.a.codes is not seen.a.codes
    assert copied(cast(X, 0.5, ("0", "forward", 1))).slot == ("0", "forward", 1)


def test_a_layers_call_is_nothing_that_was_recorded() -> None:
    """A script that sees calls of layers and nothing inside them cannot tell."""

    @contextlib.contextmanager
    def deaf(layers: Any, record: Any) -> Iterator[None]:
        yield

    subject = SimpleNamespace(
        layer=lambda settings: torch.nn.Linear(2, 2), listen=deaf,
        backward=lambda outputs, grads, retain: torch.autograd.backward(outputs, grads),
    )  # fmt: skip
    events = (("forward", 0, 0, "train", False), ("backward", 0, (0,), False))
    hows = {0: {"inside": None, "first": None, "path": 0}}
    tensors = {"input@0": torch.ones(1, 2), "grad_output@0/0": torch.ones(1, 2)}
    run = play_layers(
        Trace(),
        lambda layers: layers,
        tensors,
        subject=subject,
        job=Job(events, "float32", "cpu", (1, 2), (1, 2), layers=Layers(("0",), "chain", hows)),
        taps=Taps(listens=True),
    )
    assert run.recorded == [] and set(run.results) == {"y0", "x0.grad@1"}


def in_fp4(high: int, wide: int) -> Cast:
    """As TransformerEngine's NVFP4 casts blocks of so many rows and columns."""
    if wide == 1:  # columns, of which each 16 are transformed first: a 4 becomes sixteen 1
        x, codes = torch.zeros(32, 32), torch.zeros(32, 32, dtype=torch.uint8)
        x[0], codes[:16] = 4.0, 7
        scale, amax = torch.tensor([[448.0] * 32, [0.0] * 32]), 1.0
    else:
        x, codes = torch.ones(32, 32), torch.full((32, 32), 7, dtype=torch.uint8)
        scale, amax = torch.full((32 // high, 32 // wide), 224.0), 2.0
        x[0, 0], codes[:high, :wide], codes[0, 0], scale[0, 0] = 2.0, 5, 7, 448.0
    bits = torch.tensor([amax]).view(torch.int32).long() << 8
    levels = bits | scale.to(torch.float8_e4m3fn).view(torch.uint8).long()
    return Cast(None, x.bfloat16(), codes, levels, "e2m1")


@pytest.mark.parametrize(("high", "wide"), [(1, 16), (16, 1), (16, 16)])
def test_scales_of_fp4_blocks_have_two_levels(high: int, wide: int) -> None:
    seen = in_fp4(high, wide)
    told, shows = wrong_casts([seen], kind="nvfp4")
    assert not shows and see_cast(seen, ExecutionPoint("forward")).wrong is None, told
    for change in (1, 1 << 8):  # of a block's scale, and of the tensor's
        other = seen._replace(scale=seen.scale + change * (seen.scale == seen.scale[0, 0]))
        wrong = see_cast(other, ExecutionPoint("forward")).wrong
        assert wrong is not None and (wrong.what, wrong.place) == ("scale", (0, 0))
        assert wrong_casts([other], kind="nvfp4")[1]
    codes = seen.codes.clone()
    codes[31, 31] ^= 1
    wrong = see_cast(seen._replace(codes=codes), ExecutionPoint("forward")).wrong
    assert wrong is not None and (wrong.what, wrong.place) == ("codes", (31, 31))
    assert wrong_casts([seen._replace(codes=codes)], kind="nvfp4")[1]


def test_either_neighbour_is_right_where_gradients_are_rounded_stochastically() -> None:
    """All elements but the largest lie near the middle of 3 and 4."""
    seen = in_fp4(1, 16)
    x, levels = seen.input.clone(), seen.scale
    x[:, ::16], x[x == 1.0] = 2.0, 7 / 6
    levels = torch.full_like(levels, int(levels[0, 0]))
    codes = torch.randint(5, 7, x.shape, dtype=torch.uint8)
    codes[:, ::16], codes[0, 1:3] = 7, torch.tensor([5, 6])
    seen = Cast(None, x, codes, levels, "e2m1")

    def told(seen: Cast, phase: Phase, rounding: CastRounding) -> str:
        wrong = see_cast(seen, ExecutionPoint(phase), rounding).wrong
        judged = rounding if phase == "backward" else "nearest"
        assert wrong_casts([seen], kind="nvfp4", rounding=judged)[1] == (wrong is not None)
        return "" if wrong is None else getattr(wrong, "way", "codes")

    assert told(seen, "backward", "stochastic") == ""
    for phase, rounding in (("forward", "stochastic"), ("backward", "nearest")):
        assert told(seen, phase, rounding) == "codes"
    third = codes.clone()
    third[3, 3] = 4
    wrong = see_cast(seen._replace(codes=third), ExecutionPoint("backward"), "stochastic").wrong
    assert wrong is not None and (wrong.got, wrong.want, wrong.other) == (2.0, 3.0, 4.0)
    assert told(seen._replace(codes=third), "backward", "stochastic") == "codes"
    off = x.clone()  # a quarter of the step from 3
    off[off < 2.0] = 1.0859375
    for up, way in ((0, "toward zero"), (1, "away from zero")):
        one = torch.where(codes == 7, 7, 5 + up).to(torch.uint8)
        assert told(seen._replace(input=off, codes=one), "backward", "stochastic") == way


def test_what_hardware_makes_of_nan_and_infinity_is_right_in_fp4() -> None:
    x = torch.ones(16, 32)
    x[0, 0], x[1, 0] = math.nan, -math.inf
    codes = torch.full((16, 32), 7, dtype=torch.uint8)
    codes[1, 0], codes[1, 1:16] = 15, 0
    scale = torch.tensor(1.0 / 6.0).to(torch.float8_e4m3fn).view(torch.uint8).long()
    levels = torch.full((16, 2), int(scale))
    levels[1, 0] = 0x7E
    levels |= torch.tensor([math.inf]).view(torch.int32).long() << 8
    seen = Cast(None, x, codes, levels, "e2m1")
    assert see_cast(seen, ExecutionPoint("forward")).wrong is None
    assert not wrong_casts([seen], kind="nvfp4")[1]
