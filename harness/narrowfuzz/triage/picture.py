"""state.png: a slot's scale and newest maxima over the events of a schedule, arm by arm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowfuzz.triage.finding import Story

_STYLES = ({"color": "tab:blue", "lw": 3.0, "alpha": 0.5}, {"color": "tab:red", "lw": 1.5})


def draw_state(story: Story, path: Path) -> None:
    """Write the picture. What is not finite leaves a gap in its line."""
    # half a second of import that only a stateful finding needs
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9.0, 6.0), layout="constrained")
    FigureCanvasAgg(figure)
    scale, maxima = figure.subplots(2, 1, sharex=True)
    for (arm, states), style in zip(story.states.items(), _STYLES, strict=False):
        events = [state.event for state in states]
        options: dict[str, Any] = {"marker": "o", "label": arm, **style}
        scale.plot(events, [_finite(state.scale) for state in states], **options)
        maxima.plot(events, [_newest(state.window) for state in states], **options)
    scale.set(title=f"{story.slot}\n{story.broke}", ylabel="scale", yscale="log")
    maxima.set(ylabel="newest maximum", xlabel="event")
    for axes in (scale, maxima):
        axes.grid(alpha=0.3)
        if story.event >= 0:
            axes.axvline(story.event, color="tab:red", ls="--", lw=1.0)
    scale.legend()
    maxima.xaxis.set_major_locator(MaxNLocator(integer=True))
    maxima.text(
        0.0, -0.25, "\n".join(story.lines), transform=maxima.transAxes, va="top",
        family="monospace", fontsize=7,
    )  # fmt: skip
    figure.savefig(path, dpi=110, bbox_inches="tight")


def _finite(x: float | str) -> float:
    return float("nan") if isinstance(x, str) else x


def _newest(window: list[float | str]) -> float:
    """What is staged, or else what was committed last; 0 before anything was seen."""
    staged, committed = _finite(window[0]), _finite(window[-1])
    return staged if staged else committed
