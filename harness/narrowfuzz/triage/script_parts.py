"""Pieces of text that several kinds of scripts share."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping

import numpy as np

from narrowfuzz.arms.ladder import Arm
from narrowfuzz.case import Spec
from narrowfuzz.numerics.formats import F32
from narrowfuzz.numerics.plan import ROLES, Plan

#: Where ``seen`` holds the operands of a role: ``sites`` defines ``at``.
SITE: dict[str, str] = {role: f"at[{role!r}]" for role in ROLES}
#: The slots of a side's codes and scale in an entry of ``seen``.
SLOT = {"a": 0, "b": 2}
#: How a model calls a single linear's parameters.
OF_LINEAR = {"weight": "proj.weight", "bias": "proj.bias"}
#: After the standard library's imports: whatever is not the script's subject ends it with 125.
GUARD = "sys.excepthook = lambda *e: (sys.__excepthook__(*e), sys.stdout.flush(), os._exit(125))"

#: For an arm without oneDNN.
NATIVE = "\ntorch.backends.mkldnn.enabled = False"
#: glibc fills what is allocated from here on with 0xff, NaN: what is never written shows.
POISON = "getattr(ctypes.CDLL(None), 'mallopt', print)(-6, 256)"


def sites(plan: Plan, arm: Arm) -> str:
    """The line that says where in ``seen`` a GEMM stands; counted from the end, past any
    recompute. Inside a compiled artefact a multiply in high precision is seen too."""
    shown = [str(role) for role in ROLES if plan.gemms[role].quantised or arm.compiler]
    at = {role: i - len(shown) if i else 0 for i, role in enumerate(shown)}
    return f"at = {at!r}"


def hex_rows(rows: F32, dtype: str) -> str:
    """One line of hex a row: the arguments of the script's ``tensor``."""
    return "\n".join(f'    "{_hex(row, dtype)}",' for row in rows)


def _hex(row: F32, dtype: str) -> str:
    bits = np.ascontiguousarray(row, dtype=np.float32).view(np.uint32)
    if dtype == "bf16":
        return (bits >> np.uint32(16)).astype("<u2").tobytes().hex()
    if dtype == "fp16":
        return np.ascontiguousarray(row, dtype="<f2").tobytes().hex()
    return bits.astype("<u4").tobytes().hex()


def layouts(spec: Spec) -> str:
    """Lines that give ``x`` and ``g`` the Spec's memory layouts."""
    lines = {
        "transposed": "    {0} = {0}.transpose(-1, -2).contiguous().transpose(-1, -2)\n",
        "strided": "    wide = torch.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=dtype)\n"
        "    wide[..., ::2] = x\n    x = wide[..., ::2]\n",
        "contiguous": "",
    }
    text = lines[spec.input_layout].format("x")
    if spec.grad_layout == "expanded":
        return text + ("    g = grad_output[0].expand(g.shape)\n" if spec.tokens else "")
    return text + lines[spec.grad_layout].format("g")


def equal_check(label: str) -> str:
    """``got`` and ``want`` have equal bits, NaN equal to NaN and -0 to 0."""
    return (
        "\nequal = torch.equal(got.nan_to_num(nan=0.5) + 0.0, want.nan_to_num(nan=0.5) + 0.0)\n"
        f'print("{label}:", "holds" if equal else "BROKEN")\n'
        "sys.exit(0 if equal else 1)"
    )


def blob(tensors: Mapping[str, F32]) -> str:
    """All tensors as fp32 in one zlib-compressed literal."""
    raw = b"".join(np.ascontiguousarray(t, dtype="<f4").tobytes() for t in tensors.values())
    literal = base64.b85encode(zlib.compress(raw, 9)).decode()
    lines = "\n".join(f"    {literal[i : i + 92]!r}" for i in range(0, len(literal), 92))
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    return (
        f"SHAPES = {shapes!r}\n"
        f"raw = bytearray(zlib.decompress(base64.b85decode(\n{lines}\n)))\n"
        "flat, tensors = torch.frombuffer(raw + bytes(4), dtype=torch.float32), {}\n"
        "for name, shape in SHAPES.items():\n"
        "    size = math.prod(shape)\n"
        "    tensors[name], flat = flat[:size].reshape(shape), flat[size:]"
    )
