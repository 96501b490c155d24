"""A schedule as readable Python."""

from __future__ import annotations

from collections.abc import Iterator

from narrowfuzz.case.events import (
    Backward,
    Close,
    Event,
    Forward,
    Open,
    Reload,
    Settings,
    Step,
    Switch,
)
from narrowfuzz.case.spec import Spec


def lines(spec: Spec) -> list[str]:
    """One line per event, indented by the regions around it."""
    depth, number = 0, 0
    out: list[str] = []
    for event in spec.training:
        if isinstance(event, Close):
            depth -= 1
            if out and out[-1].endswith(":"):
                out.append("    " * (depth + 1) + "pass")
            continue
        out.append("    " * depth + sentence(event, number))
        depth += isinstance(event, Open)
        number += isinstance(event, Forward)
    if out and out[-1].endswith(":"):
        out.append("    " * depth + "pass")
    return out


def heading(spec: Spec) -> str:
    """A comment line with the model, and with the settings that differ from their defaults."""
    layers = f"{spec.layer}, {spec.layout}"
    if spec.layout == "chain":
        layers = spec.layer if spec.depth == 1 else f"{spec.depth} times {spec.layer}"
    parts = [layers]
    if spec.quantized_init:
        parts.append("parameters in FP8")
    if spec.region != "none":
        by = "" if spec.checkpoint_by == "library" else "torch "
        kind = "reentrant" if spec.reentrant else "not reentrant"
        parts.append(f"{by}checkpoint={spec.region} ({kind})")
    if spec.sharded:
        parts.append(f"on ranks ({spec.sharding})")
    settings, usual = spec.settings, Settings()
    parts += [
        f"{name}={getattr(settings, name)}"
        for name in settings.__struct_fields__
        if getattr(settings, name) != getattr(usual, name)
    ]
    return f"# {', '.join(parts)}"


def sentence(event: Event, number: int) -> str:
    """One event as code; ``number`` is the number of the next forward."""
    match event:
        case Open(enabled=enabled):
            return f"with autocast({'recipe' if enabled else 'enabled=False'}):"
        case Close():
            return "# leave the region"
        case Forward():
            return f"y{number} = model({', '.join(_forward(event, number))})"
        case Backward(of=of, retain=retain):
            pairs = ", ".join(f"y{f}: {_values('g', event.values, event.shift)}" for f in of)
            return f"backward({{{pairs}}}{', retain_graph=True' if retain else ''})"
        case Step():
            return "optimizer.step(); optimizer.zero_grad()"
        case Reload():
            return "model = load(save(model))"
        case Switch():
            settings = {
                "history": event.history,
                "algorithm": event.algorithm,
                "margin": event.margin,
            }
            changes = [f"{k}={v!r}" for k, v in settings.items() if v is not None]
            return f"recipe = replace({', '.join(['recipe', *changes])})"
    raise AssertionError(event)


def _forward(event: Forward, number: int) -> Iterator[str]:
    yield _values(f"x{number}", event.values, event.shift)
    if event.mode != "train":
        yield f"mode={event.mode!r}"
    if event.inside:
        yield "autocast='inside'"
    if event.first is not None:
        yield f"is_first_microbatch={event.first}"
    if event.path:
        yield f"path={event.path}"


def _values(name: str, values: str, shift: int) -> str:
    text = name if values == "gaussian" else f"{values}({name})"
    return f"{text} * 2**{shift}" if shift else text
