"""``reference.delayed`` in a stand-alone script: a finding there is a fault planted in it."""

from __future__ import annotations

from narrowfuzz.case import Spec
from narrowfuzz.schedule.events import Settings
from narrowfuzz.stateful import ScheduleScript

_SCALES = '''\
def scales(layers):
    """Name, scale and window of past maxima of every tensor that has them."""
    for name, layer in layers.named_children():
        for direction in ("forward", "backward"):
            held, windows = (getattr(layer, f"{direction}_{x}") for x in ("scale", "window"))
            for i in range(len(held)):
                yield f"{name} {direction} slot {i}", held[i], windows[:, i]'''

_LISTEN = """\
from narrowfuzz.models.delayed import Cast, Product, listening
def slot_of(cast):
    return f"{list(layers).index(cast.layer)} {cast.direction} slot {cast.slot}"
def sides(product):
    pairs = ((product.a, product.a_scale), (product.b, product.b_scale))
    return [(codes, 1.0 / scale, str(codes.dtype)) for codes, scale in pairs]"""

_LOAD = """\
for i, layer in enumerate(layers):
    layer.resize(len(state[f"{i}.forward_window"]))
layers.load_state_dict(state)"""


def script(spec: Spec) -> ScheduleScript:
    """Imports our own layer, and nothing else of ours."""
    schedule = spec.schedule
    assert schedule is not None
    history = schedule.settings.history
    return ScheduleScript(
        imports="from narrowfuzz.models import delayed",
        layer=f"delayed.DelayedLinear({spec.k}, {spec.k}, bias={spec.bias}, dtype=dtype, "
        f"history={history})",
        recipe=_recipe,
        region="delayed.autocast(recipe)",
        off="delayed.autocast(None)",
        checkpoint="delayed.checkpoint",
        backward="delayed.backward",
        scales=_SCALES,
        listen=_LISTEN,
        pending="pending = delayed.pending",
        reset="reset = delayed.reset",
        load=_LOAD,
    )


def _recipe(settings: Settings) -> str:
    told = [f"history={settings.history}"]
    if settings.algorithm != "max":
        told.append(f'algorithm="{settings.algorithm}"')
    if settings.margin:
        told.append(f"margin={settings.margin}")
    if not settings.fused:
        told.append("fused=False")
    if settings.format == "e4m3":
        told.append('backward="e4m3"')
    return f"delayed.DelayedScaling({', '.join(told)})"
