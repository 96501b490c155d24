"""The check at the end of a single linear's short script: source text, chosen by what the verdict
expects (``verdict.expect``) and where it points (``verdict.at``)."""

from __future__ import annotations

import math

from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.rules.contract import RULE
from narrowfuzz.rules.repeat import AGAIN
from narrowfuzz.trace.expect import Is, OneOf, Present, Refuses, Runs, Same, Within, read
from narrowfuzz.trace.verdict import LOSES_DEVICE, Verdict
from narrowfuzz.triage.script.parts import POISON, SITE, SLOT


def check_text(verdict: Verdict) -> str:
    """Source text that checks the element or the property that the verdict is about. "" if a short
    script cannot check it, for example if other runs are compared: then a played script does."""
    at, expect = verdict.at, verdict.expect
    if verdict.runs or at.run not in ("", AGAIN) or any(given.at.run for given in verdict.given):
        return ""
    if at.phase == "recompute" and isinstance(expect, Same):
        return recompute_text()
    if AGAIN in (at.run, *([expect.at.run] if isinstance(expect, Same) else [])):
        return equal_text(
            f"runs = [run(input, weight, grad_output)]\n{POISON}\n"
            "runs += [run(input, weight, grad_output) for _ in range(20)]",
            "runs[0]",
            "next((r for r in runs if not same(r, runs[0])), runs[0])",
            verdict.role,
        )
    if isinstance(expect, Runs | Refuses | Present):
        return contract_text(verdict)
    if not isinstance(expect, Is | Within | OneOf | Same):
        return ""
    if isinstance(expect, Same):
        arm = BY_NAME[verdict.arm]
        return _against_plain(verdict) if arm.checkpoint and expect.at.run == arm.stage else ""
    if at.what != "result":
        return operand_text(verdict)
    got = f'run(input, weight, grad_output)["{verdict.role}"]{list(at.index)}'
    return check_element(verdict, f"{got}.item()")


def _against_plain(verdict: Verdict) -> str:
    return equal_text(
        "kept = run(input, weight, grad_output, checkpointed=False)",
        "kept",
        "run(input, weight, grad_output)",
        verdict.role,
    )


def recompute_text() -> str:
    """The check that forward and recompute have the same codes and scales."""
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


#: The check of a layer that should have refused.
ACCEPTED = """
try:
    {call}
except Exception as error:
    print(f"refuses: {{type(error).__name__}}: {{error}}")
    sys.exit(0)
print({said!r})
sys.exit(1)
"""


def accepted(call: str, due: Refuses) -> str:
    """The check of a call that runs although it should be refused."""
    return ACCEPTED.format(call=call, said=f"runs; expected {due}")


def contract_text(verdict: Verdict) -> str:
    """The check of rule contract: of a missing gradient, of an exception in the wrong phase or with
    the wrong message, or of a missing exception."""
    expect = verdict.expect
    if isinstance(expect, Refuses) and not expect.raised:
        return accepted("run(input, weight, grad_output)", expect)
    if isinstance(expect, Present):
        return (
            "found = run(input, weight, grad_output)\n"
            f"missing = [name for name in {list(expect.names)!r} if found[name] is None]\n"
            'print("no gradient of:", ", ".join(missing) or "nothing")\n'
            "sys.exit(1 if missing else 0)"
        )
    return check_raises(verdict, "run(input, weight, grad_output)")


_RAISES = """
try:
    {call}
except Exception as error:
    text = str(error).strip() or "(no message)"
    print(f"{{{said}}} raises {{type(error).__name__}}: {{text.splitlines()[0]}}")
    sys.exit({code})
print("runs forward and backward")
sys.exit(0)
"""


def check_raises(verdict: Verdict, call: str, phase: str = "phase", said: str = "") -> str:
    """The check that ``call`` still raises what it raised in the verdict. ``phase`` is an
    expression for how far the call came, and ``said`` a more precise one to print, if given."""
    if verdict.symptom == LOSES_DEVICE:  # noticed only when the host waits for the device
        call += "\n    if torch.cuda.is_available():\n        torch.cuda.synchronize()"
    return _RAISES.format(call=call, said=said or phase, code=_exit_code(verdict, phase))


def _exit_code(verdict: Verdict, phase: str) -> str:
    """An expression for the exit code, which may use ``error``, ``text`` and ``phase``. It is 125,
    cannot tell, for an error of another type than the verdict's, and for any error if the finding
    is a crash or a hang."""
    expect = verdict.expect
    if not isinstance(expect, Runs | Refuses) or not expect.raised:
        return "125"
    shown: dict[str, str] = {
        "time": f'{phase} == "backward"',
        "rule": f"not re.search({RULE.pattern!r}, text, re.I)",
        "layer": '"proj" not in text',
    }
    condition = shown.get(expect.lacking, "True") if isinstance(expect, Refuses) else "True"
    return f'int({condition}) if type(error).__name__ == "{expect.raised}" else 125'


def check_element(verdict: Verdict, got: str) -> str:
    """The check of the number that the expression ``got`` gives: it must lie in one of the
    verdict's intervals, or be NaN."""
    index = list(verdict.at.index)
    if isinstance(verdict.expect, Within | OneOf):
        ranges = (verdict.expect,) if isinstance(verdict.expect, Within) else verdict.expect.ranges
        ends = [(read(one.lo), read(one.hi)) for one in ranges]
        allowed = " or ".join(
            repr(lo) if lo == hi else f"between {lo!r} and {hi!r}" for lo, hi in ends
        )
        condition = " or ".join(f'float("{lo!r}") <= got <= float("{hi!r}")' for lo, hi in ends)
    else:
        assert isinstance(verdict.expect, Is) and math.isnan(read(verdict.expect.value))
        allowed, condition = "NaN", "math.isnan(got)"
    return (
        f"got = {got}\n"
        f'print("{verdict.role}{index}: expected {allowed}, got", got)\n'
        f"sys.exit(0 if {condition} else 1)"
    )


def operand_text(verdict: Verdict) -> str:
    """The check of a code, scale or amax that a GEMM received, against the rule's value."""
    expect, at = verdict.expect, verdict.at
    index = f"[{', '.join(map(str, at.index))}]" if at.index else ""
    slot = {"a": 4, "b": 5}[at.side] if at.what == "amax" else SLOT[at.side]
    got = f"seen[{SITE[at.name]}][{slot}].float(){index}.item()"
    if at.what == "scale":
        got = f"seen[{SITE[at.name]}][{slot + 1}]"
        got = f"({got}.view(torch.uint8) if {got}.element_size() == 1 else {got}){index}.item()"
    given = ", ".join(str(one) for one in verdict.given if one.at.what != "tensor")
    run = f"run(input, weight, grad_output)\ngot = {got}\n"
    text = f"{verdict.located}: expected {expect}{f' ({given})' if given else ''}, got"
    if isinstance(expect, Within):  # a cast with stochastic rounding
        lo, hi = read(expect.lo), read(expect.hi)
        return f'{run}print("{text}", got)\nsys.exit(0 if {lo!r} <= got <= {hi!r} else 1)'
    assert isinstance(expect, Is)
    signed = " and math.copysign(1.0, got) == math.copysign(1.0, expected)" * expect.signed
    return (
        f'{run}expected = float.fromhex("{expect.value}")\n'
        f'print("{text}", got)\n'
        f"sys.exit(0 if got == expected{signed} or "
        "(math.isnan(got) and math.isnan(expected)) else 1)"
    )


_SAME = """
def plain(t):
    return torch.zeros(0) if t is None else t.nan_to_num(nan=0.5)
def same(x, y):
    return all(torch.equal(plain(x[role]), plain(y[role])) for role in x)
"""


def equal_text(setup: str, before: str, after: str, role: str) -> str:
    """The check that all results of two runs are equal."""
    return (
        f"{_SAME.strip()}\n{setup}\nbefore, after = {before}, {after}\n"
        f'print("{role}:", "equal" if same(before, after) else "DIFFERENT")\n'
        "sys.exit(0 if same(before, after) else 1)"
    )
