"""Pieces of source text that several kinds of scripts share."""

from __future__ import annotations

import base64
import functools
import zlib
from collections.abc import Mapping

import numpy as np

from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.spec import ModelName, Spec
from narrowfuzz.machine.overlay import active_releases
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.numerics.formats import F32
from narrowfuzz.numerics.plan import ROLES, Plan
from narrowfuzz.play import group_models, groups, models, operator_models, own, te_experts, titan
from narrowfuzz.trace.verdict import Verdict
from narrowfuzz.triage.script.paste import hoisted, pasted, undefined_in
from narrowfuzz.triage.verify import GUARD, SILENT

#: Tensors by their names in a case.
Tensors = Mapping[str, F32]
#: Role -> an index into the script's list ``seen`` for the operands of that role's GEMM; the line
#: written by ``sites`` defines ``at``.
SITE: dict[str, str] = {role: f"at[{role!r}]" for role in ROLES}
#: Side of a GEMM -> the index of its codes in an entry of ``seen``; its scale follows.
SLOT = {"a": 0, "b": 2}
TORCH_NAME = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


#: Memory that is allocated after this contains 0xff bytes, which are NaN, so elements that are
#: never written show. On the CPU glibc fills it; on a GPU, freed blocks of such bytes are reused.
POISON = """\
getattr(ctypes.CDLL(None), 'mallopt', print)(-6, 256)
if torch.cuda.is_available():
    blocks = [torch.full((2**size,), 255, dtype=torch.uint8, device="cuda")
              for size in range(9, 22) for _ in range(8)]
    del blocks"""


def sites(plan: Plan) -> str:
    """The line that defines ``at``: role -> index of its GEMM in ``seen``, counted from the end
    (past any recompute) except for the first."""
    shown = [str(role) for role in ROLES if plan.gemms[role].quantised]
    at = {role: i - len(shown) if i else 0 for i, role in enumerate(shown)}
    return f"at = {at!r}"


def hex_rows(rows: F32, dtype: str) -> str:
    """The arguments of a script's ``tensor``: one line of hexadecimal for each row."""
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


#: Characters on a line of encoded data, which nobody reads.
_WIDE = 1000


def packed(tensors: Tensors) -> str:
    """A call of the player's ``unpacked`` that returns these tensors."""
    raw = b"".join(np.ascontiguousarray(t, dtype="<f4").tobytes() for t in tensors.values())
    text = base64.b85encode(zlib.compress(raw, 9)).decode()
    lines = "\n".join(f"    {text[i : i + _WIDE]!r}" for i in range(0, len(text), _WIDE))
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    return f"unpacked({shapes!r},\n{lines})"


def docstring(verdict: Verdict, subject: str) -> str:
    """The docstring of a script; ``subject`` names what it runs."""
    over = f" over {', '.join(active_releases())}" if active_releases() else ""
    how = f"{subject}{over}, {BY_NAME[verdict.arm].words}, rule {verdict.rule}"
    return (
        f'"""{quoted(verdict.sentence())}\n\n{how}. '
        'Exits 1 while this shows, 0 once it is gone, 125 if it cannot tell."""'
    )


def guarded(head: str, *parts: str, environment: Mapping[str, str] = {}) -> str:
    """A script's text: docstring, guard, environment variables that must be set before all imports,
    imports, then the parts. Raises ValueError if the text is not valid Python or uses names that
    nothing defines."""
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
    """The text escaped so that it may stand between triple quotes, whatever a library's message
    contains."""
    return text.replace("\\", "\\\\").replace('"""', "'''").replace("\0", "\\0")


@functools.cache
def model_source(*names: ModelName) -> str:
    """Source of the models' classes, each after the classes that it uses."""
    homes = (models, operator_models, group_models, groups, own, te_experts, titan)
    return pasted([MODELS[name].module for name in names], homes)
