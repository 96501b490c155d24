"""Where inside the compiler a finding starts, by PyTorch's own CompilerBisector."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from narrowfuzz.explain import bisected
from narrowfuzz.triage.verify import ended, script_command, script_environment

#: Backend -> what it adds to the backend before it: the finding starts there if none of the
#: backend's subsystems makes a difference.
_OF_BACKENDS: Mapping[str, str] = {
    "eager": "Dynamo (it shows with backend='eager', which runs the captured graph as it is)",
    "aot_eager": "AOTAutograd (it shows with backend='aot_eager')",
    "aot_eager_decomp_partition": "AOTAutograd's partitioner (it shows with backend="
    "'aot_eager_decomp_partition', whichever decompositions are left out)",
    "inductor": "Inductor's code generation (it shows whichever graph passes and lowerings are "
    "left out, and with all settings tried)",
}
#: Subsystem -> the noun for one thing that it applies.
_APPLIED: Mapping[str, str] = {
    "decomposition": "decomposition",
    "pre_grad_passes": "graph pass before autograd",
    "joint_graph_passes": "pass over the joint graph",
    "post_grad_passes": "pass over the graph of forward or backward",
    "cudagraphs": "CUDA graph",
    "lowerings": "lowering",
}


def starts_in(
    script: Path, device: str, plant: tuple[str, str] | None, seconds: float
) -> tuple[str, bool]:
    """A sentence on where the divergence starts, "" if the script cannot tell or not in this time;
    and whether there was time enough."""
    with tempfile.TemporaryDirectory(prefix="narrowfuzz-bisect-") as cache:
        command = script_command(Path(bisected.__file__), plant=plant, device=device)
        environment = {**script_environment(Path(cache)), "SCRIPT": str(script)}
        code, out, _ = ended(command, environment, seconds)
    if code == 0:
        return sentence(msgspec.json.decode(out.splitlines()[-1])), True
    return (in_part(out), False) if code is None else ("", True)


def in_part(printed: str) -> str:
    """What the bisector knows before it has ended: backends are tried in order, and Inductor is the
    last."""
    tried = re.findall(r'^{"backend": "(\w+)"}$', printed, re.MULTILINE)
    before, last = [*_OF_BACKENDS][-2:]
    return f"{last} (it does not show with backend='{before}')" if last in tried else ""


def sentence(found: Mapping[str, Any]) -> str:
    """The result of the bisector, in words."""
    backend, subsystem, what = found["backend"], found["subsystem"], found["what"]
    if not subsystem:
        return _OF_BACKENDS[backend]
    if subsystem == "setting":
        return f"{backend}, and is gone with the setting {what}"
    operator = re.search(r"op='([\w.:]+)', overload='(\w+)'", what)
    of = f"{operator[1]}.{operator[2]}" if operator else what
    applied = f"{backend}, at {_APPLIED.get(subsystem, subsystem)} number {found['number']}"
    return f"{applied}: {of}" if of else applied
