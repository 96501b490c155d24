"""Does the emulated extension of TransformerEngine return the same results as its own extension?

On a machine with a GPU and TransformerEngine 2.20.2, then on any machine:

    python benchmarks/te_calls.py record FILE
    python benchmarks/te_calls.py compare FILE

``compare`` repeats each call on the emulation and prints every result with different bits: how
many elements differ, and by how many units in the last place. Sums (products, norms, a bias'
gradient) may differ so; codes of given tensors, scales, maxima and histories may not. Exit code 0:
all results have the same bits; 1: some do not.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from te_on_cpu.environment import description, enter

enter()

te: Any = importlib.import_module("transformer_engine.pytorch")
tex: Any = importlib.import_module("transformer_engine_torch")
DType = importlib.import_module("transformer_engine.pytorch.constants").DType
quantizing = importlib.import_module("transformer_engine.pytorch.tensor")

INF, NAN = float("inf"), float("nan")
E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
KINDS = {BF16: DType.kBFloat16, FP16: DType.kFloat16, FP32: DType.kFloat32}
#: Numbers that are critical for casts: zeros, subnormals, ties between codes, the largest numbers
#: and larger ones.
EDGES = (
    0.0, -0.0, INF, -INF, NAN, 2.0**-9, 2.0**-10, 1.5 * 2.0**-10, 2.0**-16, 2.0**-17,
    1.5 * 2.0**-17, 2.0**-126, 2.0**-133, 1e-45, 1.0625, 1.1875, 17.0, 17.5, 18.0, 232.0, 248.0,
    432.0, 447.0, 448.0, 463.9, 464.0, 464.1, 480.0, 496.0, 53248.0, 57344.0, 61440.0, 61441.0,
    65504.0, 1e30, 3.3e38,
)  # fmt: skip
Made = dict[str, torch.Tensor | None]
Answers = dict[str, dict[str, torch.Tensor] | str]


def numbers(data: str, dtype: torch.dtype, rows: int = 32, columns: int = 64) -> torch.Tensor:
    torch.manual_seed(17)
    x = torch.randn(rows, columns)
    if data == "wide":
        x = x * torch.logspace(-12, 8, columns, base=2)
    if data == "tiny":
        x = x * 2.0**-120
    if data == "edges":
        x.view(-1)[::3] = torch.tensor(EDGES).repeat(x.numel())[: len(x.view(-1)[::3])]
    if data == "zeros":
        x = torch.zeros_like(x)
    return x.to(dtype).cuda()


def delayed(form: str, scale: float = 1.0, amax: float = 0.0) -> Any:
    return quantizing.Float8Quantizer(
        torch.tensor([scale]).cuda(), torch.tensor([amax]).cuda(), FORMATS[form], columnwise=True
    )


def current(form: str, **options: Any) -> Any:
    return quantizing.Float8CurrentScalingQuantizer(FORMATS[form], torch.device("cuda"), **options)


def parts(tensor: Any, quantizer: Any = None) -> Made:
    """All buffers of a quantised tensor, and the amax cell of its quantizer."""
    if type(tensor) is torch.Tensor:
        return {"value": tensor}
    made = {"codes": tensor._data, "transpose": tensor._transpose, "inverse": tensor._scale_inv}
    return made | ({"amax": quantizer.amax} if hasattr(quantizer, "amax") else {})


def quantised(make: Callable[[], Any], *args: Any) -> Made:
    quantizer = make()
    return parts(tex.quantize(*args, quantizer), quantizer)


def quantizers() -> Iterator[tuple[str, Callable[[], Any]]]:
    for form in FORMATS:
        for scale, amax in ((1.0, 0.0), (0.37, 5.0), (2.0**20, 0.0), (1e-3, 0.0)):
            yield f"delayed {form} {scale}", partial(delayed, form, scale, amax)
        yield f"current {form}", partial(current, form)
        yield (
            f"current {form} pow2",
            partial(current, form, force_pow_2_scales=True, amax_epsilon=2.0**-100),
        )


FEW = {
    "none": lambda: None,
    "delayed": lambda: delayed("e4m3", 3.7),
    "current": lambda: current("e4m3"),
}


def casts() -> Iterator[tuple[str, Callable[[], Made]]]:
    for (name, make), data, (word, dtype) in itertools.product(
        quantizers(), ("normal", "wide", "tiny", "edges", "zeros"), DTYPES.items()
    ):
        yield (
            f"quantize {name} {data} {word}",
            partial(quantised, make, numbers(data, dtype)),
        )
    for form, (word, dtype), inverse in itertools.product(
        FORMATS, DTYPES.items(), (1.0, 0.37, 2.0**-130)
    ):
        yield (
            f"dequantize {form} {word} {inverse}",
            partial(dequantised, form, dtype, inverse),
        )
    for data, (word, dtype) in itertools.product(("normal", "edges"), DTYPES.items()):
        yield f"compute_amax {data} {word}", partial(amax_of, numbers(data, dtype))
    yield (
        "fp8_transpose",
        lambda: {
            "value": tex.fp8_transpose(numbers("normal", BF16).view(torch.uint8), E4M3, out=None)
        },
    )
    for kind, (word, dtype) in itertools.product(("delayed", "current"), DTYPES.items()):
        yield f"split_quantize {kind} {word}", partial(split, kind, dtype)


def dequantised(form: str, dtype: torch.dtype, inverse: float) -> Made:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).cuda()
    tensor = tex.quantize(torch.zeros(16, 16).cuda(), delayed(form))
    tensor._data.copy_(codes)
    tensor._scale_inv.fill_(inverse)
    return {"value": tex.dequantize(tensor, KINDS[dtype])}


def amax_of(x: torch.Tensor) -> Made:
    cell = torch.full((1,), 99.0).cuda()
    tex.compute_amax(x, cell)
    return {"amax": cell}


def split(kind: str, dtype: torch.dtype) -> Made:
    made = [FEW[kind]() for _ in range(3)]
    out = tex.split_quantize(numbers("wide", dtype), [16, 0, 16], made)
    return {
        f"{i} {name}": t
        for i, (one, quantizer) in enumerate(zip(out, made, strict=True))
        for name, t in parts(one, quantizer).items()
    }


def updates() -> Iterator[tuple[str, Callable[[], Made]]]:
    for algorithm, form, margin in itertools.product(("max", "most_recent"), FORMATS, (0, 2, -3)):
        yield (
            f"update {algorithm} {form} {margin}",
            partial(updated, algorithm, form, margin),
        )


def updated(algorithm: str, form: str, margin: int) -> Made:
    newest = [3.0, 0.0, NAN, INF, 1e-40, 5.0, 3e38, 0.3]
    reduced = [3.0, 0.0, NAN, INF, 1e-40, 7.0, 3e38, 0.3]
    history = torch.zeros(4, 8)
    history[0], history[1] = torch.tensor(newest), torch.tensor([4.0, 9, NAN, 1, 1, 1, INF, 0.1])
    history[3] = torch.tensor([1.0, 1, 1, 1, 0, 8, 0, 0.2])
    second = torch.tensor([[2.0, 0.5]]).repeat(4, 1)
    histories = [history.cuda(), second.cuda()]
    scales = [torch.full((8,), 9.0).cuda(), torch.full((2,), 9.0).cuda()]
    tex.fused_amax_and_scale_update_after_reduction(
        torch.tensor([*reduced, 2.0, 0.25]).cuda(),
        histories,
        scales,
        algorithm,
        FORMATS[form],
        margin,
    )
    names = ("history 0", "history 1", "scale 0", "scale 1")
    return dict(zip(names, (*histories, *scales), strict=True))


def norms() -> Iterator[tuple[str, Callable[[], Made]]]:
    for (name, columns), kind, (word, dtype), centered in itertools.product(
        itertools.product(("layernorm", "rmsnorm"), (64, 1024)), FEW, DTYPES.items(), (False, True)
    ):
        yield (
            f"{name} {columns} {kind} {word} {'centered' if centered else ''}".strip(),
            partial(normed, name, columns, kind, dtype, centered),
        )


def normed(name: str, columns: int, kind: str, dtype: torch.dtype, centered: bool) -> Made:
    x, quantizer = numbers("normal", dtype, 8, columns) * 3 + 1, FEW[kind]()
    gamma, beta = numbers("normal", dtype, 2, columns) + 1
    layer = name == "layernorm"
    given = (x, gamma, beta) if layer else (x, gamma)
    forward, backward = getattr(tex, f"{name}_fwd"), getattr(tex, f"{name}_bwd")
    out, mean, rsigma = forward(*given, 1e-5, None, quantizer, KINDS[dtype], 0, centered)
    made = {"mean": mean, "rsigma": rsigma, **parts(out, quantizer)}
    if kind == "none":
        gradient = numbers("wide", dtype, 8, columns)
        statistics = (mean, rsigma) if layer else (rsigma,)
        grads = backward(gradient, x, *statistics, gamma, 0, centered)
        made |= dict(zip(("dx", "dgamma", "dbeta"), grads, strict=False))
    return made


PLAIN = ("gelu", "qgelu", "silu", "relu", "srelu")
GATED = ("geglu", "qgeglu", "swiglu", "reglu", "sreglu", "glu")


def activations() -> Iterator[tuple[str, Callable[[], Made]]]:
    for name, kind, (word, dtype), data in itertools.product(
        (*PLAIN, *GATED), FEW, DTYPES.items(), ("wide", "edges")
    ):
        yield (
            f"{name} {kind} {word} {data}",
            partial(activated, name, kind, dtype, data),
        )


def activated(name: str, kind: str, dtype: torch.dtype, data: str) -> Made:
    x = numbers(data, dtype)
    made: Made = {}
    gradient = numbers("normal", dtype, 32, 32 if name in GATED else 64)
    for function, args in ((name, (x,)), (f"d{name}", (gradient, x))):
        quantizer = FEW[kind]()
        out = getattr(tex, function)(*args, quantizer)
        made |= {f"{function} {part}": t for part, t in parts(out, quantizer).items()}
    if name in PLAIN and kind != "none":
        quantizer = FEW[kind]()
        bias, out = getattr(tex, f"dbias_d{name}")(gradient, x, quantizer)
        made |= {f"dbias {part}": t for part, t in parts(out, quantizer).items()} | {"dbias": bias}
    return made


def products() -> Iterator[tuple[str, Callable[[], Made]]]:
    for kind, (word, dtype), layout, bias in itertools.product(
        FEW, DTYPES.items(), ("TN", "NN", "NT"), (False, True)
    ):
        if not (bias and layout != "TN") and not (bias and dtype == FP32 and kind != "none"):
            yield (
                f"gemm {kind} {word} {layout} {'bias' if bias else ''}".strip(),
                partial(multiplied, kind, dtype, layout, bias),
            )
    for kind, split_accumulator in itertools.product(("delayed", "current"), (False, True)):
        yield (
            f"gemm {kind} long {split_accumulator}",
            partial(long_product, kind, split_accumulator),
        )


def multiplied(kind: str, dtype: torch.dtype, layout: str, bias: bool) -> Made:
    a, b = numbers("normal", dtype, 32, 64), numbers("wide", dtype, *SHAPES[layout])
    if kind != "none":
        a, b = tex.quantize(a, FEW[kind]()), tex.quantize(b, current("e4m3"))
    added = numbers("normal", dtype, 1, 32)[0] if bias else None
    out = te.cpp_extensions.general_gemm(a, b, out_dtype=dtype, layout=layout, bias=added)[0]
    return {"value": out}


SHAPES = {"TN": (48, 64), "NN": (48, 32), "NT": (32, 48)}


def long_product(kind: str, split_accumulator: bool) -> Made:
    a, b = (numbers(data, BF16, 16, 2048) for data in ("normal", "wide"))
    a, b = tex.quantize(a, FEW[kind]()), tex.quantize(b, FEW[kind]())
    out = te.cpp_extensions.general_gemm(
        a, b, out_dtype=FP32, layout="TN", use_split_accumulator=split_accumulator
    )[0]
    return {"value": out}


def attention() -> Iterator[tuple[str, Callable[[], Made]]]:
    for word, dtype in {"bf16": BF16, "fp16": FP16}.items():
        yield f"softmax {word}", partial(softmax, dtype)
    for (word, dtype), interleaved in itertools.product(DTYPES.items(), (False, True)):
        yield f"rope {word} {interleaved}", partial(rotated, dtype, interleaved)


def softmax(dtype: torch.dtype) -> Made:
    x = numbers("normal", dtype, 64, 32).view(2, 2, 16, 32) * 4
    mask = (numbers("normal", FP32, 32, 32).view(2, 1, 16, 32) < 0.3).clone()
    mask[0, 0, 0] = True
    plain = tex.scaled_softmax_forward(x, 0.5)
    masked = tex.scaled_masked_softmax_forward(x, mask, 0.5)
    gradient = numbers("wide", dtype, 64, 32).view(2, 2, 16, 32)
    return {
        "plain": plain, "masked": masked,
        "plain backward": tex.scaled_softmax_backward(gradient.clone(), plain, 0.5),
        "masked backward": tex.scaled_masked_softmax_backward(gradient.clone(), masked, 0.5),
    }  # fmt: skip


def rotated(dtype: torch.dtype, interleaved: bool) -> Made:
    freqs = te.RotaryPositionEmbedding(16, rotary_percent=0.5, interleaved=interleaved)(32)
    x = numbers("normal", dtype, 32, 128).view(32, 2, 4, 16).requires_grad_()
    y = te.attention.rope.apply_rotary_pos_emb(
        x, freqs.cuda(), "sbhd", fused=True, interleaved=interleaved
    )
    y.backward(numbers("wide", dtype, 32, 128).view(32, 2, 4, 16))
    return {"value": y.detach(), "grad": x.grad}


def every() -> dict[str, Callable[[], Made]]:
    """All calls, by name."""
    groups = (casts, updates, norms, activations, products, attention)
    return {name: call for group in groups for name, call in group()}


def answers() -> Answers:
    """The results of each call, on the CPU, or the error that it raises as text."""
    made: Answers = {}
    for name, call in every().items():
        try:
            with torch.no_grad() if not name.startswith("rope") else torch.enable_grad():
                found = call()
            made[name] = {part: t.detach().cpu() for part, t in found.items() if t is not None}
        except (
            RuntimeError,
            TypeError,
            ValueError,
            AssertionError,
        ) as error:  # an error is a result to compare, too
            made[name] = f"{type(error).__name__}: {error}"
    return made


def differences(recorded: Answers, here: Answers) -> Iterator[tuple[str, str]]:
    """(call and part, description of the difference) for each result with different bits; all NaNs
    count as equal."""
    for name in sorted(recorded.keys() | here.keys()):
        one, other = recorded.get(name), here.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            for part in sorted(one.keys() | other.keys()):
                if why := _apart(one.get(part), other.get(part)):
                    yield f"{name}: {part}", why
        elif one != other:
            yield name, f"recorded {_short(one)}, here {_short(other)}"


def _short(answer: Any) -> str:
    return "a result" if isinstance(answer, dict) else str(answer)[:200]


def _apart(one: torch.Tensor | None, other: torch.Tensor | None) -> str:
    """How a recorded tensor differs from the one made here; "" if it does not."""
    if one is None or other is None:
        return "" if one is other else f"only {'here' if one is None else 'recorded'}"
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"recorded {one.dtype} {[*one.shape]}, here {other.dtype} {[*other.shape]}"
    ordered = [_ordered(x) for x in (one, other)]
    wrong = (ordered[0] != ordered[1]) & ~(one.isnan() & other.isnan())
    if not wrong.any():
        return ""
    place = tuple(wrong.nonzero()[0].tolist())
    largest = int((ordered[0] - ordered[1]).abs()[wrong].max())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} differ, by up to {largest} in the last place; at "
        f"{[*place]} recorded {one[place].item():.9g}, here {other[place].item():.9g}"
    )


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the values, such that neighbouring values are one apart; -0 and 0
    differ."""
    kind = {2: torch.int16, 4: torch.int32}.get(x.element_size())
    if not x.is_floating_point() or kind is None:
        return x.long()
    bits = x.view(kind).long()
    return torch.where(bits < 0, -(bits & (2 ** (8 * x.element_size() - 1) - 1)) - 1, bits)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file")
    args = parser.parse_args()
    here = answers()
    if args.what == "record":
        torch.save({"library": description(), "answers": here}, args.file)
        print(f"{len(here)} calls of TransformerEngine {description()}")
        return 0
    recorded = torch.load(args.file, weights_only=True)
    print(f"recorded: TransformerEngine {recorded['library']}; here: {description()}")
    found = list(differences(recorded["answers"], here))
    for name, why in found:
        print(f"{name}: {why}")
    print(f"{len(found)} results of {len(here)} calls differ")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
