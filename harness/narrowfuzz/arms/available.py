"""Which arms can run on this machine and on a given device."""

from __future__ import annotations

import fnmatch
import importlib.util
import shutil
import sysconfig
from collections.abc import Collection, Sequence
from pathlib import Path

from narrowfuzz.case.arm import COMPILED, EAGER, EAGER_NATIVE, Arm, Compile
from narrowfuzz.case.ladder import BY_NAME
from narrowfuzz.case.layout import LAYOUTS
from narrowfuzz.case.spec import Spec
from narrowfuzz.machine.gpu import gpus
from narrowfuzz.machine.machine import onednn_stays
from narrowfuzz.models.catalog import MODELS
from narrowfuzz.recipe.recipe import unknown


def select_arms(globs: Sequence[str]) -> frozenset[str]:
    """Names of the arms matching any glob (all if none is given). Raises ValueError for a glob that
    matches nothing."""
    chosen: set[str] = set()
    for glob in globs:
        hits = fnmatch.filter(BY_NAME, glob)
        if not hits:
            raise ValueError(unknown("arm", glob, BY_NAME))
        chosen.update(hits)
    return frozenset(chosen or BY_NAME)


def none_runs(globs: Sequence[str], device: str) -> str:
    """Why none of the arms that match these globs can run here, or "" if one can."""
    lacking = {name: unavailable(BY_NAME[name], device) for name in sorted(select_arms(globs))}
    if not all(lacking.values()):
        return ""
    name, why = next(iter(lacking.items()))
    return f"{name} cannot run here: {why}"


def only_ranks(globs: Sequence[str]) -> bool:
    """Do these globs match no other arms than those on ranks?"""
    return all(BY_NAME[name].sharded for name in select_arms(globs))


def rungs_of(arms: Collection[str], device: str = "cpu") -> tuple[Compile, ...]:
    """The values of ``Spec.compile`` whose ladders contain at least one of these arms that can run
    here; ("none",), which is eager, if there are none. Empty if all these arms are sharded."""
    if all(BY_NAME[name].sharded for name in arms):
        return ()
    stages = {BY_NAME[name].stage for name in arms if not unavailable(BY_NAME[name], device)}
    own: dict[Compile, set[str]] = {
        r: {a.stage for a in climbed} for r, climbed in COMPILED.items()
    }
    own["none"] = {EAGER.stage, EAGER_NATIVE.stage}
    own["inductor"] -= own["aot_eager"]  # which has slices of its own
    return tuple(rung for rung, wanted in own.items() if stages & wanted) or ("none",)


#: Further Inductor options that reproduce eager's rounding in Triton code, which by default divides
#: by approximation and flushes subnormal numbers to zero.
_EXACT = {"eager_numerics.division_rounding": True, "eager_numerics.disable_ftz": True}


def options_on(arm: Arm, device: str) -> dict[str, object]:
    """The arm's options for torch.compile on a device ("cpu", "cuda")."""
    exact = _EXACT if arm.options and device != "cpu" else {}
    return dict(arm.options) | exact


def approximate(arm: Arm, device: str) -> bool:
    """May the arm's code on a device divide by approximation? Source: ``div.full.f32`` of the PTX
    ISA, up to 2 units in the last place off. A reciprocal is approximate even where division is
    exact: Inductor divides an integer 1, and rounds quotients of two floats only."""
    return arm.compiler == "inductor" and device != "cpu"


def keeps_generators(arm: Arm, spec: Spec, device: str) -> bool:
    """Does the arm's graph draw random numbers, and draw them again in backward, from generators of
    its own, which manual_seed does not reach? Source: torch/_functorch/partitioners.py,
    ``apply_graphsafe_rng_functionalization`` (pytorch#146878), for CUDA only."""
    recomputes = bool(arm.checkpoint) or spec.memory_budget < 100
    draws = MODELS[spec.model].random
    return bool(arm.compiler) and recomputes and draws and device != "cpu"


def natives(arms: Collection[str], device: str) -> bool:
    """Do ``arms`` include the one with PyTorch's own kernels in place of oneDNN's, and can it run
    here?"""
    return EAGER_NATIVE.name in arms and not unavailable(EAGER_NATIVE, device)


def on_ranks(arms: Collection[str], device: str) -> bool:
    """Do ``arms`` include a sharded one that can run here?"""
    laid_out = (arm for name in arms if (arm := BY_NAME[name]).sharded)
    return any(not unavailable(arm, device) for arm in laid_out)


def _no_ranks(arm: Arm, device: str) -> str:
    """Why a sharded arm cannot run on a device other than the CPU, or "" if it can."""
    if not arm.processes:
        return "threads are no ranks there: torch runs a GPU's backward in a thread of its own"
    if device == "simulated":
        return "NCCL knows no simulated GPU"
    if (here := len(gpus())) < 2:
        return f"NCCL wants a GPU for each rank, of at least two: there is {here or 'none'}"
    return ""


def unavailable(arm: Arm, device: str = "cpu") -> str:
    """Why this machine cannot run the arm on the device, or "" if it can."""
    if arm.sharded and device != "cpu":
        return _no_ranks(arm, device)
    for layout in LAYOUTS:
        if layout.arm == arm.stage:
            return layout.player.unavailable()  # type: ignore[no-any-return]
    if arm.native:
        return "oneDNN runs on CPUs only" if device != "cpu" else onednn_stays()
    if arm.compiler and device == "simulated":
        return "compilers query the GPU, which is only simulated"
    if arm.compiler != "inductor":
        return ""
    needed, of = ["g++", "clang++"], "CPU"
    if device.startswith("cuda"):
        needed, of = ["gcc", "clang", "cc"], "Triton"
        if importlib.util.find_spec("triton") is None:
            return "Inductor's GPU code needs Triton: pip install triton"
    if not any(map(shutil.which, needed)):
        return f"Inductor's {of} code needs a compiler: install {needed[0]}"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not headers.is_file():
        return f"Inductor's {of} code needs the Python headers: {headers} is missing"
    return ""
