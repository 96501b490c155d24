"""Pieces of text that several kinds of scripts share."""

from __future__ import annotations

import base64
import functools
import zlib
from collections.abc import Mapping

import numpy as np

from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import ModelName, Spec
from narrowfuzz.machine.overlay import laid
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import F32
from narrowfuzz.numerics.plan import ROLES, Plan
from narrowfuzz.play import groups, models, operator_models, own, titan
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.script.paste import hoisted, pasted, undefined_in
from narrowfuzz.triage.verify import GUARD, SILENT

#: Values by their names in a case.
Tensors = Mapping[str, F32]
#: Where ``seen`` holds the operands of a role: ``sites`` defines ``at``.
SITE: dict[str, str] = {role: f"at[{role!r}]" for role in ROLES}
#: The slots of a side's codes and scale in an entry of ``seen``.
SLOT = {"a": 0, "b": 2}
TORCH_NAME = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


#: What is allocated from here on is filled with 0xff, NaN: what is never written shows. glibc fills
#: by itself, of a GPU's memory it is blocks that are given back.
POISON = """\
getattr(ctypes.CDLL(None), 'mallopt', print)(-6, 256)
if torch.cuda.is_available():
    blocks = [torch.full((2**size,), 255, dtype=torch.uint8, device="cuda")
              for size in range(9, 22) for _ in range(8)]
    del blocks"""


def sites(plan: Plan) -> str:
    """The line that says where in ``seen`` a GEMM stands; counted from the end, past any
    recompute."""
    shown = [str(role) for role in ROLES if plan.gemms[role].quantised]
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
        "strided": "    size = (*x.shape[:-1], 2 * x.shape[-1])\n"
        "    wide = torch.zeros(size, dtype=dtype, device=device)\n"
        "    wide[..., ::2] = x\n    x = wide[..., ::2]\n",
        "contiguous": "",
    }
    text = lines[spec.input_layout].format("x")
    if spec.grad_layout == "expanded":
        return text + ("    g = grad_output[0].expand(g.shape)\n" if spec.tokens else "")
    return text + lines[spec.grad_layout].format("g")


#: Characters of a line that nobody reads.
_WIDE = 1000


def packed(tensors: Tensors) -> str:
    """A call of the player's ``unpacked`` that gives these tensors."""
    raw = b"".join(np.ascontiguousarray(t, dtype="<f4").tobytes() for t in tensors.values())
    text = base64.b85encode(zlib.compress(raw, 9)).decode()
    lines = "\n".join(f"    {text[i : i + _WIDE]!r}" for i in range(0, len(text), _WIDE))
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    return f"unpacked({shapes!r},\n{lines})"


def docstring(verdict: Verdict, subject: str) -> str:
    """What a script says of itself; ``subject`` is what it runs."""
    over = f" over {', '.join(laid())}" if laid() else ""
    how = f"{subject}{over}, {BY_NAME[verdict.arm].words}, rule {verdict.rule}"
    return (
        f'"""{quoted(verdict.sentence())}\n\n{how}. '
        'Exits 1 while this shows, 0 once it is gone, 125 if it cannot tell."""'
    )


def guarded(head: str, *parts: str, environment: Mapping[str, str] = {}) -> str:
    """A script's text: docstring, guard, variables that must be set before all imports, imports,
    then the parts. Raises ValueError if it is no Python, or uses what it does not define."""
    body = "\n".join(part.strip("\n") for part in parts if part)
    first = f"from __future__ import annotations\n{SILENT}\n{GUARD}"
    if environment:
        first += f"\nos.environ.update({dict(environment)!r})"
    try:
        text = f"{head}\n{first}\n{hoisted(body)}\n"
        compile(text, "repro.py", "exec")
    except SyntaxError as error:
        raise ValueError(f"the pasted source is no Python: {error}") from None
    if missing := undefined_in(text):
        raise ValueError(f"the pasted source uses what nobody defines: {', '.join(missing)}")
    return text


def quoted(text: str) -> str:
    """Text that may stand between triple quotes, whatever a library said."""
    return text.replace("\\", "\\\\").replace('"""', "'''").replace("\0", "\\0")


@functools.cache
def model_source(*names: ModelName) -> str:
    """Source of the models' classes, those that they use first."""
    homes = (models, operator_models, groups, own, titan)
    return pasted([MODELS[name].module for name in names], homes)
