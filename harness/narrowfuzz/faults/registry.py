"""Finding faults: the built-in ones and those of a user's fault file."""

from __future__ import annotations

from pathlib import Path

from narrowfuzz.content import load_definitions
from narrowfuzz.faults.fault import Fault
from narrowfuzz.recipe import unknown


def builtin_faults() -> dict[str, Fault]:
    """All built-in faults by id."""
    from narrowfuzz.faults import (
        attention,
        casts,
        census,
        checkpoint,
        compile,
        contract,
        delayed_operands,
        delayed_recompute,
        delayed_state,
        delayed_updates,
        device,
        gemm,
        gradients,
        graphs,
        hopper,
        kept,
        layout,
        lowering,
        mx_codes,
        mx_scales,
        operands,
        recompute,
        scales,
        te_operands,
        te_recompute,
        te_scales,
        te_state,
        te_updates,
        training,
    )

    families = (
        scales, casts, gemm, layout, recompute, compile, contract, census,
        mx_scales, mx_codes, operands, kept, device, attention, checkpoint, gradients,
        lowering, graphs, training,
        delayed_state, delayed_updates, delayed_recompute, delayed_operands,
        te_state, te_updates, te_recompute, te_operands, te_scales, hopper,
    )  # fmt: skip
    return {fault.id: fault for family in families for fault in family.FAULTS}


#: Of the faults in our own references, one for each kind of harm: those are scored. The others
#: protect a rule each, most have their like in a library, and a score is about libraries.
SCORED_OWN = frozenset(
    {
        "forward-scale-frozen", "history-advances-twice", "scale-a-step-late",
        "update-before-maxima", "weight-gets-inputs-amax", "history-never-rolls",
        "idle-history-rolls", "kept-weight-newer-scale", "recompute-default-recipe",
        "recompute-high-precision", "weight-cache-stale", "amax-overwritten",
        "evaluation-stages", "saved-without-history", "state-outlives-model",
    }
)  # fmt: skip


def load_fault_file(file: Path) -> dict[str, Fault]:
    """Faults of a user's file. Raises ValueError naming the file if it cannot be used."""
    found = load_definitions(file, "fault", "FAULTS", (Fault,))
    return {fault.id: fault for fault in found}


def find_fault(file: str, fault_id: str) -> Fault:
    """The fault with this id, from a fault file or, with "", from the built-in ones."""
    faults = load_fault_file(Path(file)) if file else builtin_faults()
    if fault_id not in faults:
        raise ValueError(unknown("fault", fault_id, faults))
    return faults[fault_id]
