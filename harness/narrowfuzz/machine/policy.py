"""Probes how this torch casts where versions differ. The results are printed, never assumed."""

from __future__ import annotations

from functools import cache

_EDGES = {"e4m3fn": (449.0, 465.0), "e5m2": (57345.0, 61440.0)}


@cache
def cast_policies(device: str = "cpu") -> dict[str, str]:
    """Behaviour of torch's casts on a device, in the cases where releases or devices disagree."""
    import torch

    found: dict[str, str] = {}
    for name, dtype in (("e4m3fn", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        past = (
            torch.tensor([_EDGES[name][1], float("inf"), float("nan")], device=device)
            .to(dtype)
            .float()
        )
        found[f"{name} finite overflow"] = _word(past[0].item())
        found[f"{name} inf"] = _word(past[1].item())
        found[f"{name} nan"] = _word(past[2].item())
    tie = torch.tensor([1.0 + 2.0**-4], device=device).to(torch.float8_e4m3fn).float().item()
    found["e4m3fn tie 1.0625"] = "to even (1.0)" if tie == 1.0 else f"to {tie}"
    below = (
        torch.tensor([2.0**-127], device=device).to(torch.float8_e8m0fnu).view(torch.uint8).item()
    )
    found["e8m0 of 2^-127"] = f"byte {below}"
    subnormal = torch.tensor([2.0**-130], device=device) * 0.5
    found["fp32 subnormals"] = "kept" if subnormal.item() == 2.0**-131 else "flushed"
    tiny = torch.full((32, 32), 2.0**-130, dtype=torch.bfloat16, device=device)
    is_kept = (tiny @ torch.eye(32, dtype=torch.bfloat16, device=device)).abs().max().item() > 0
    found["bf16 matmul subnormals"] = "kept" if is_kept else "flushed"
    return found


def _word(value: float) -> str:
    if value != value:
        return "NaN"
    return "inf" if value in (float("inf"), float("-inf")) else f"saturates to {value:g}"
