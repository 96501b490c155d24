"""O2 of a schedule in a script: every cast against the definition."""

from __future__ import annotations

from narrowfuzz.oracles.schedule_evidence import ScheduleEvidence
from narrowfuzz.stateful import ScheduleScript
from narrowfuzz.triage.script_schedule_checks import EXIT, RUN, Check, no_mark
from narrowfuzz.triage.script_training import Play
from narrowfuzz.verdict import Verdict

_CAST = '''\
casts = broken = 0
def hear(seen):
    """{promise}"""
    global casts, broken
    if isinstance(seen, Cast):
        fp8 = {{"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}}[seen.format]
        largest = torch.finfo(fp8).max
        x, scale = seen.input.detach().float(), seen.scale
{scales}
        want = (x * scale).clamp(-largest, largest).to(fp8)
        wrong = want.view(torch.uint8) != seen.codes.view(torch.uint8).reshape(want.shape)
        wrong &= ~(want.float().isnan() & seen.codes.view(fp8).reshape(want.shape).float().isnan())
        casts, broken = casts + 1, broken + int(wrong.any() or other.any())
        if wrong.any() or other.any():
            print(f"{{seen.format}} cast: {{int(other.sum())}} of {{other.numel()}} scales and "
                  f"{{int(wrong.sum())}} of {{wrong.numel()}} codes are not the definition's")'''

_GIVEN = "        other = torch.zeros(0, dtype=torch.bool)  # the scale is another rule's business"

_OWN = """\
        amax = x.abs().nan_to_num(nan=0.0, posinf=math.inf).max()
        right = torch.tensor(largest).div(amax).clamp(max=torch.finfo(torch.float32).max)
        other = scale != torch.where((amax > 0) & amax.isfinite(), right, 1.0)"""

_BLOCKS = """\
        x = x.reshape(-1, x.shape[-1])
        along = scale.shape == (x.shape[0], x.shape[1] // 32)  # rows, not columns
        lines, scale = (x, scale) if along else (x.t(), scale.t())
        amax = lines.abs().nan_to_num(nan=0.0, posinf=math.inf).reshape(len(lines), -1, 32).amax(2)
        def byte(amax):
            m, e = amax.frexp()  # m * 2^e, and the largest code is 0.875 * 2^9 or 2^16
            rounded = e - {"e4m3": 9, "e5m2": 16}[seen.format] + (m > 0.875).int()
            rounded = torch.where(amax > 0, rounded + 127, 0).clamp(0, 254)
            return torch.where(amax.isinf(), 254, rounded)
        # kernels multiply by a rounded reciprocal
        other = (scale < byte(amax * (1 - 2**-22))) | (scale > byte(amax * (1 + 2**-22)))
        factor = torch.exp2(127.0 - scale.float()).repeat_interleave(32, 1)
        scale = factor if along else factor.t()"""

_SCALES = {
    "delayed": ("Codes must be the saturating cast of the tensor times its scale.", _GIVEN),
    "current": ("Codes are the saturating cast by the scale of the tensor's own maximum.", _OWN),
    "mx": ("Blocks have the smallest power of two that holds them, and codes follow it.", _BLOCKS),
}


def check_casts(evidence: ScheduleEvidence, verdict: Verdict, text: ScheduleScript) -> Check:
    """Every cast of the schedule."""
    promise, scales = _SCALES[evidence.kind]
    return Check(
        play=Play(evidence.case.spec, text, verdict.arm != "eager"),
        uses=("scales", "listen"),
        before=_CAST.format(promise=promise, scales=scales),
        mark=no_mark,
        after=f'{RUN}\nprint(f"{{casts}} casts, {{broken}} wrong"){EXIT}',
    )
