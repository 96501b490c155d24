"""Script text that plays a schedule: its model, and its events as a user would write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from narrowfuzz.case import LEARNING_RATE, Spec
from narrowfuzz.oracles.schedule_evidence import switched
from narrowfuzz.schedule.events import (
    Backward,
    Close,
    Event,
    Forward,
    Open,
    Reload,
    Schedule,
    Settings,
    Step,
    Switch,
)
from narrowfuzz.stateful import ScheduleScript

#: The line to put after an event, "" for none; the variables hold what the event made.
Mark = Callable[[int, Event, list[str]], str]


@dataclass(frozen=True)
class Play:
    """How a schedule is to be played."""

    spec: Spec
    text: ScheduleScript
    #: Whether what the schedule checkpoints is recomputed; a script that compares says so per run.
    checkpointed: bool
    #: The script defines ``checkpoint(function, x)`` itself.
    own_checkpoint: bool = False
    #: The script says with ``reloads`` whether a Reload happens.
    optional_reload: bool = False

    @property
    def schedule(self) -> Schedule:
        assert self.spec.schedule is not None
        return self.spec.schedule

    @property
    def recomputes(self) -> bool:
        return self.checkpointed and self.schedule.checkpoint != "none"

    def again(self, function: str, x: str) -> str:
        """A checkpoint of ``function`` at ``x``."""
        if self.own_checkpoint:
            return f"checkpoint({function}, {x})"
        return checkpoint_call(self.spec, self.text, function, x)


def quoted(text: str) -> str:
    """A string literal."""
    return json.dumps(text)


def checkpoint_call(spec: Spec, text: ScheduleScript, function: str, x: str) -> str:
    """The schedule's own checkpoint function."""
    assert spec.schedule is not None
    name = text.checkpoint
    if spec.schedule.checkpoint_by == "torch":
        name = "torch.utils.checkpoint.checkpoint"
    return f"{name}({function}, {x}, use_reentrant={spec.schedule.reentrant})"


def _forwards(schedule: Schedule) -> list[Forward]:
    return [event for event in schedule.events if isinstance(event, Forward)]


def _plain(play: Play) -> bool:
    """True where the model is one layer, called in one way: events call it by name."""
    s = play.schedule
    plain = all(not (f.inside or f.path) and f.first is None for f in _forwards(s))
    return plain and s.layout == "chain" and s.depth == 1 and s.checkpoint != "nested"


def _parameters(play: Play) -> dict[str, str]:
    """What forwards differ in, and each parameter's value in the simplest of them."""
    forwards, found = _forwards(play.schedule), {}
    if any(f.inside for f in forwards):
        found["recipe"] = "None"
    if any(f.first is not None for f in forwards):
        found["first"] = "None"
    if play.schedule.layout == "branch":
        found["path"] = "0"
    if play.recomputes and len({f.mode == "train" for f in forwards}) > 1:
        found["again"] = "True"
    return found


def model(play: Play) -> str:
    """Defines ``model(x, ...)``; "" where the layer alone is the model."""
    if _plain(play):
        return ""
    s, given = play.schedule, _parameters(play)
    per_call = s.checkpoint in ("each", "nested")
    region = ""
    if "recipe" in given:
        region = f"with {play.text.region} if recipe else contextlib.nullcontext():"
    first = ", is_first_microbatch=first" if "first" in given else ""
    signature = "".join(f", {name}={value}" for name, value in given.items())
    lines = [f"def model(x{signature}):"]
    if per_call:
        lines += ["    def one(layer):", "        def run(x):"]
        lines += _inside(region, [f"return layer(x{first})"], "            ")
        lines.append(f"        return {_again(play, 'run', given)}")
        calls = _calls(s, lambda i: f"one(layers[{i}])(x)")
    else:
        calls = _calls(s, lambda i: f"layers[{i}](x{first})")
    if s.checkpoint in ("whole", "nested") and play.recomputes:
        lines += ["    def whole(x):"]
        lines += _inside("" if per_call else region, calls, "        ")
        once = play.again("whole", "x")
        lines.append(
            f"    return {once if 'again' not in given else once + ' if again else whole(x)'}"
        )
    else:
        lines += _inside("" if per_call else region, calls, "    ")
    return "\n".join(lines)


def _again(play: Play, function: str, given: dict[str, str]) -> str:
    if not play.recomputes:
        return function
    once = f"lambda x: {play.again(function, 'x')}"
    return f"({once}) if again else {function}" if "again" in given else once


def _inside(region: str, lines: list[str], indent: str) -> list[str]:
    if not region:
        return [indent + line for line in lines]
    return [indent + region, *(f"{indent}    {line}" for line in lines)]


def _calls(schedule: Schedule, call: Callable[[object], str]) -> list[str]:
    """The layers of a layout, one after the other."""
    match schedule.layout:
        case "branch":
            return [f"return {call('path')}"]
        case "dangling":
            return [call(0), f"return {call(1)}"]
    order = [0, 0] if schedule.layout == "twice" else range(schedule.layers)
    lines = [f"x = {call(i)}" for i in order]
    return [*lines[:-1], "return" + lines[-1].removeprefix("x =")]


def training(play: Play, mark: Mark, lead: Mark, arguments: str = "") -> str:
    """Defines ``train()``: the schedule, event by event, with a line before and after each."""
    lines = [f"def train({arguments}):", "    global layers"]
    if play.schedule.quantized_init:  # quantising initial values leaves their maximum behind
        lines.append("    torch.manual_seed(0)")
    lines.append("    layers = build()")
    if any(isinstance(event, Switch) for event in play.schedule.events):
        lines.append(f"    recipe = {play.text.recipe(play.schedule.settings)}")
    if any(isinstance(event, Step) for event in play.schedule.events):
        lines.append(f"    {_OPTIMIZER}")
    lines += [f"    {line}" for line in _events(play, mark, lead)]
    return "\n".join(lines)


_OPTIMIZER = f"optimizer = torch.optim.SGD(layers.parameters(), lr={LEARNING_RATE['sgd']})"


def _events(play: Play, mark: Mark, lead: Mark) -> Iterator[str]:
    depth = forwards = backwards = 0
    empty = False
    settings = play.schedule.settings
    for i, event in enumerate(play.schedule.events):
        indent = "    " * depth
        made: list[str] = []
        if isinstance(event, Open):
            yield f"{indent}with {play.text.region if event.enabled else play.text.off}:"
            depth, empty = depth + 1, True
            if after := mark(i, event, made):
                empty = False
                yield f"{indent}    {after}"
            continue
        if isinstance(event, Close):
            if empty:
                yield f"{indent}pass"
            depth -= 1
            indent, lines = "    " * depth, []
        elif isinstance(event, Forward):
            lines, made = _forward(play, event, forwards), [f"y{forwards}"]
            forwards += 1
        elif isinstance(event, Backward):
            lines, made = [backward_call(play, event, backwards)], [f"x{f}.grad" for f in event.of]
            backwards += 1
        elif isinstance(event, Switch):
            settings = switched(settings, event)
            lines = [f"recipe = {play.text.recipe(settings)}"]
        else:
            lines = _between(play, event, settings)
        empty = False
        if first := lead(i, event, made):
            yield indent + first
        yield from (indent + line for line in lines)
        if after := mark(i, event, made):
            yield indent + after
        if isinstance(event, Step):  # a mark may look at the gradients
            yield f"{indent}optimizer.zero_grad()"
    if empty:
        yield "    " * depth + "pass"


def _forward(play: Play, event: Forward, number: int) -> list[str]:
    x, trains = f"x{number}", event.mode == "train"
    if _plain(play):
        call = play.again("layers[0]", x) if trains and play.recomputes else f"layers[0]({x})"
    else:
        given = _parameters(play)
        told = {
            "recipe": "recipe" if event.inside else "None",
            "first": repr(event.first),
            "path": str(event.path),
            "again": str(trains),
        }
        differs = [f"{n}={told[n]}" for n, default in given.items() if told[n] != default]
        call = f"model({', '.join([x, *differs])})"
    if trains:
        return [f"y{number} = {call}"]
    lines = ["with torch.no_grad():", f"    y{number} = {call}"]
    return ["layers.eval()", *lines, "layers.train()"] if event.mode == "eval" else lines


def backward_call(play: Play, event: Backward, number: int) -> str:
    """One backward, through as many outputs as it names."""
    ys = [f"y{f}" for f in event.of]
    gs = [gradient_name(number, f, event) for f in event.of]
    retain = ", retain_graph=True" if event.retain else ""
    if len(ys) == 1 and play.text.backward.startswith("torch."):
        return f"{ys[0]}.backward({gs[0]}{retain})"
    return f"{play.text.backward}([{', '.join(ys)}], [{', '.join(gs)}]{retain})"


def gradient_name(backward: int, forward: int, event: Backward) -> str:
    """The variable that holds what a backward sends into a forward's output."""
    return f"g{backward}" if len(event.of) == 1 else f"g{backward}_{forward}"


#: A fresh model has other values than the one that was saved.
_OVERWRITTEN = (
    "with torch.no_grad():",
    "    for p in layers.parameters():",
    "        p.copy_(torch.ones(p.shape))",
)


def _between(play: Play, event: Event, settings: Settings) -> list[str]:
    if isinstance(event, Step):
        return ["optimizer.step()"]
    assert isinstance(event, Reload)
    lines = [
        "file = io.BytesIO()",
        "torch.save(layers.state_dict(), file)",
        "file.seek(0)",
        "layers, state = build(), torch.load(file, weights_only=False)",
        *(_OVERWRITTEN if play.optional_reload else ()),
        *play.text.load.splitlines(),
    ]
    if any(isinstance(e, Step) for e in play.schedule.events):
        lines.append(_OPTIMIZER)
    return ["if reloads:", *(f"    {x}" for x in lines)] if play.optional_reload else lines
