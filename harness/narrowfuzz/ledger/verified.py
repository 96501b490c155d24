"""The versions on which the ledger and the baselines were verified: ``reports/verified.json``.

``make versions`` writes one record for each pair of torch and torchao, in place of an earlier
record of the same pair; ``doctor`` reads them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from narrowfuzz.recipe.content import content_dir


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """The result of verifying one pair of versions."""

    date: str
    python: str
    torch: str
    torchao: str
    #: oneDNN's kernels on the machine that was used: see narrowfuzz.machine.machine.
    kernels: dict[str, str]
    #: Ledger entry -> "shows", "gone", "cannot tell"; "absent" where its library is not installed.
    entries: dict[str, str]
    #: Cases of a campaign on the unquantised baselines, and the fingerprints of its new findings.
    baseline_cases: int
    baseline_findings: tuple[str, ...]
    #: Properties of the smoke profile that passed and failed.
    properties_passed: int
    properties_failed: int
    #: Tests about a GPU that the machine does not have, passed and failed; some need Triton.
    gpu_passed: int = 0
    gpu_failed: int = 0

    def sentence(self) -> str:
        """The record in one line of text."""
        tried = {name: how for name, how in self.entries.items() if how != "absent"}
        counts = Counter(tried.values())
        cannot = counts["cannot tell"]
        unknown = f" ({cannot} cannot be checked here)" if cannot else ""
        parts = [
            f"torch {self.torch}, torchao {self.torchao} ({self.date}): {counts['shows']} of "
            f"{len(tried)} ledger entries show{unknown}",
            f"baselines: {len(self.baseline_findings)} findings in {self.baseline_cases} cases",
            f"smoke properties: {_tests(self.properties_passed, self.properties_failed)}",
        ]
        if self.gpu_passed or self.gpu_failed:
            parts.append(f"tests about an absent GPU: {_tests(self.gpu_passed, self.gpu_failed)}")
        return "; ".join(parts)


def _tests(passed: int, failed: int) -> str:
    return f"{passed} passed, {failed} failed"


def verified_file() -> Path:
    """The file of the records."""
    return content_dir("reports") / "verified.json"


def load_verified() -> list[Verified]:
    """All records; none if the file does not exist. Raises ValueError naming an invalid file."""
    file = verified_file()
    if not file.is_file():
        return []
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[Verified])
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file}: {error}") from None


def keep_verified(record: Verified) -> None:
    """Save a record, in place of an earlier one of the same versions."""
    same = (record.torch, record.torchao)
    others = [r for r in load_verified() if (r.torch, r.torchao) != same]
    raw = msgspec.json.encode(sorted([*others, record], key=lambda r: (r.torch, r.torchao)))
    verified_file().write_bytes(msgspec.json.format(raw, indent=2) + b"\n")
