"""The last lines of a repro.py: what is looked at, and what it must be. Text of the O-rules."""

from __future__ import annotations

import re

import numpy as np

from narrowfuzz.arms.ladder import BY_NAME
from narrowfuzz.oracles.contract import RULE
from narrowfuzz.oracles.quantiser import LEVEL_B
from narrowfuzz.triage.script_parts import POISON, SITE, SLOT
from narrowfuzz.verdict import Verdict

#: Rules about one element of one result.
ELEMENT_RULES = ("O5", "O15", "O6", "O7", "O10", "O11", "O16")


def check_rule(verdict: Verdict) -> str:
    """The check of a contract, an operand, an element or a repetition; "" for a relation."""
    oracle = verdict.oracle
    if oracle == "contract":
        return check_contract(verdict)
    if oracle in ELEMENT_RULES:
        got = f'run(input, weight, grad_output)["{verdict.role}"]{list(verdict.index)}'
        return check_element(verdict, f"{got}.item()")
    if oracle in ("O2", "O3", "O4"):
        return check_operand(verdict)
    if oracle == "O1":
        return check_equal(
            f"runs = [run(input, weight, grad_output)]\n{POISON}\n"
            "runs += [run(input, weight, grad_output) for _ in range(20)]",
            "runs[0]", "next((r for r in runs if not same(r, runs[0])), runs[0])", verdict.role,
        )  # fmt: skip
    if oracle == "O12":
        return check_equal(
            "plain = run(input, weight, grad_output, checkpointed=False)",
            "plain", "run(input, weight, grad_output)", verdict.role,
        )  # fmt: skip
    return check_recompute() if oracle == "O13" else ""


def check_recompute() -> str:
    """Codes and scales of forward and recompute."""
    return (
        "def bits(t):\n"
        "    t = t.flatten().clone(memory_format=torch.contiguous_format)\n"
        "    return t.view(torch.uint8)\n"
        "run(input, weight, grad_output)\n"
        "raw = [[bits(t) for t in site] for site in seen[:2]]\n"
        "same = all(torch.equal(x, y) for x, y in zip(*raw))\n"
        'print("codes, scales of forward and recompute:", "equal" if same else "DIFFERENT")\n'
        "sys.exit(0 if same else 1)"
    )


#: A layer that should have refused.
ACCEPTED = """
try:
    {call}
except Exception as error:
    print(f"refuses: {{type(error).__name__}}: {{error}}")
    sys.exit(0)
print("runs; expected {rule}")
sys.exit(1)
"""


def check_contract(verdict: Verdict) -> str:
    """A missing gradient, or an exception in the wrong phase or words, or none."""
    if verdict.symptom.startswith("accepts"):
        return ACCEPTED.format(call="run(input, weight, grad_output)", rule=verdict.allowed)
    if verdict.status == "diverged":
        name = verdict.symptom.split()[-1]
        return (
            f'missing = run(input, weight, grad_output)["{name}"] is None\n'
            f'print("{name}:", "None although its parameter requires a gradient" if missing else '
            '"there")\nsys.exit(1 if missing else 0)'
        )
    return check_raises(verdict, "run(input, weight, grad_output)")


_RAISES = """
try:
    {call}
except Exception as error:
    text = str(error).strip() or "(no message)"
    print(f"{{phase}} raises {{type(error).__name__}}: {{text.splitlines()[0]}}")
    sys.exit({code})
print("runs forward and backward")
"""


def check_raises(verdict: Verdict, call: str) -> str:
    """``call`` raises what the verdict says, or does not any more."""
    return _RAISES.format(call=call, code=_exit_code(verdict))


def _exit_code(verdict: Verdict) -> str:
    """An expression of ``error``, ``text`` and ``phase``. Another error than the verdict's is not
    this script's subject, nor is any where the process ends or hangs."""
    found = re.search(r"\((\w+) in ", verdict.symptom)
    if found is None:
        return "125"
    shown = {
        "refused only in backward": 'phase == "backward"',
        "refusal states no rule": f"not re.search({RULE.pattern!r}, text, re.I)",
        "refusal names no layer": '"proj" not in text',
    }
    condition = next((c for words, c in shown.items() if verdict.symptom.startswith(words)), "True")
    return f'int({condition}) if type(error).__name__ == "{found.group(1)}" else 125'


def check_element(verdict: Verdict, got: str) -> str:
    """The number that ``got`` computes, against the verdict's interval."""
    index = list(verdict.index)
    if np.isnan(verdict.lo):
        allowed, condition = "NaN", "math.isnan(got)"
    else:
        lo, hi = float(verdict.lo), float(verdict.hi)
        allowed = f"in [{lo!r}, {hi!r}]"
        condition = f'float("{lo!r}") <= got <= float("{hi!r}")'
    return (
        f"got = {got}\n"
        f'print("{verdict.role}{index}:", got, "must be {allowed}")\n'
        f"sys.exit(0 if {condition} else 1)"
    )


def check_operand(verdict: Verdict) -> str:
    """The code, scale or amax one GEMM saw, against the rule's value."""
    slot = SLOT[verdict.side] + (1 if verdict.oracle == "O3" else 0)
    index = f"[{', '.join(map(str, verdict.index))}]" if verdict.index else ""
    expected = verdict.allowed.split()[0].removeprefix("byte")
    if verdict.oracle == "O4":
        slot = {"a": 4, "b": 5}[verdict.side]
    if verdict.oracle == "O3":
        expected = verdict.allowed.replace("byte ", "").split()[0]
        read = f"seen[{SITE[verdict.role]}][{slot}]"
        read = f"({read}.view(torch.uint8) if {read}.element_size() == 1 else {read}){index}.item()"
    else:
        read = f"seen[{SITE[verdict.role]}][{slot}].float(){index}.item()"
    return (
        "run(input, weight, grad_output)\n"
        f"got = {read}\n"
        # nine digits name an fp32, not the float64 that they spell
        f'expected = torch.tensor(float("{expected}"), dtype=torch.float32).item()\n'
        f'print("{verdict.where}:", got, "must be {verdict.allowed}")\n'
        f"sys.exit(0 if got == expected{_signed(verdict)} or "
        "(math.isnan(got) and math.isnan(expected)) else 1)"
    )


def _signed(verdict: Verdict) -> str:
    """A code has a sign even where it is zero, which generated code does not keep."""
    if verdict.oracle != "O2" or verdict.symptom == LEVEL_B or BY_NAME[verdict.arm].compiler:
        return ""
    return " and math.copysign(1.0, got) == math.copysign(1.0, expected)"


_SAME = """
def plain(t):
    return torch.zeros(0) if t is None else t.nan_to_num(nan=0.5)
def same(x, y):
    return all(torch.equal(plain(x[role]), plain(y[role])) for role in x)
"""


def check_equal(setup: str, before: str, after: str, role: str) -> str:
    """Two runs, all results."""
    return (
        f"{_SAME.strip()}\n{setup}\nbefore, after = {before}, {after}\n"
        f'print("{role}:", "equal" if same(before, after) else "DIFFERENT")\n'
        "sys.exit(0 if same(before, after) else 1)"
    )
