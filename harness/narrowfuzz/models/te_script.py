"""TransformerEngine in a stand-alone script: its own calls, as its users write them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Literal

from narrowfuzz.case import Spec
from narrowfuzz.schedule.events import Reload, Schedule, Settings, Switch
from narrowfuzz.stateful import ScheduleScript

Kind = Literal["delayed", "current", "mx"]

_IMPORTS = """\
os.environ.setdefault("{choice}", "{version}")
if not torch.cuda.is_available():  # TransformerEngine's own Python on an emulated extension
    from te_on_cpu.environment import enter
    enter()
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import {recipe}"""

_RECIPES: dict[Kind, str] = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "mx": "MXFP8BlockScaling",
}

_LAYERS = {
    "linear": "te.Linear({k}, {k}, {options})",
    "layernorm_linear": "te.LayerNormLinear({k}, {k}, {options})",
    "rmsnorm_linear": 'te.LayerNormLinear({k}, {k}, normalization="RMSNorm", {options})',
    "layernorm_mlp": "te.LayerNormMLP({k}, 2 * {k}, {options})",
    "grouped_linear": "Adapted(te.GroupedLinear(2, {k}, {k}, {options}))",
    "transformer_layer": "Adapted(te.TransformerLayer({k}, 2 * {k}, 2, hidden_dropout=0.0, "
    "attention_dropout=0.0, fuse_qkv_params=True, {options}))",
}

_ADAPTED = """\
class Adapted(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
    def forward(self, x, is_first_microbatch=None):
{call}"""
_CALLS = {
    "grouped_linear": """\
        rows = len(x) // {two} * {one}
        return self.layer(x, [len(x) - rows, rows], is_first_microbatch=is_first_microbatch)""",
    "transformer_layer": """\
        rows = x.reshape(-1, 2, x.shape[-1])
        return self.layer(rows, is_first_microbatch=is_first_microbatch).reshape(x.shape)""",
}

_SCALES = '''\
def scales(layers):
    """Name, scale and window of past maxima of every tensor that has them."""
    for name, module in layers.named_modules():
        for direction, key in (("forward", "scaling_fwd"), ("backward", "scaling_bwd")):
            held = getattr(module, "fp8_meta", {}).get(key)
            if getattr(held, "amax_history", None) is not None:
                for i in range(len(held.scale)):
                    yield f"{name} {direction} slot {i}", held.scale[i], held.amax_history[:, i]'''

_LISTEN = '''\
from te_on_cpu.watch import Cast, Multiply as Product, listening
def slot_of(cast):
    """The slot whose staging cell the kernel stored max|input| in."""
    cell = None if cast.amax is None else cast.amax.data_ptr()
    return next((name for name, _, window in scales(layers) if window.data_ptr() == cell), "")
def sides(product):
    return [(side.data, side.scale_inv, side.format) for side in (product.a, product.b)]'''

_PENDING = '''\
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.{place} import FP8GlobalStateManager
def pending():
    """What is set aside for later."""
    state = FP8GlobalStateManager{state}
    buffers = state.fp8_tensors_recompute_buffer
    context = getattr(distributed, "activation_recompute_forward", None)
    return {{
        "regions": state.{depth},
        "stashed scales": sum(len(queue) for queue in buffers),
        "first-module flags": len(getattr(context, "_is_first_fp8_module", None) or ()),
    }}'''

_RESET = """\
from transformer_engine.pytorch.{place} import FP8GlobalStateManager
def reset():
    FP8GlobalStateManager.reset()"""


def script(kind: Kind, choice: str, version: str, spec: Spec) -> ScheduleScript:
    """The source text for TransformerEngine ``version``, which the environment variable ``choice``
    can replace where the extension is emulated."""
    schedule = spec.schedule
    assert schedule is not None
    old = version.startswith("1.")
    place = "fp8" if old else "quantization"
    name, recipe = ("fp8_autocast", "fp8_recipe") if old else ("autocast", "recipe")
    layer = _LAYERS[schedule.layer].format(k=spec.k, options=_options(spec))
    if schedule.quantized_init:
        layer = f"quantized(lambda: {layer})"
    return ScheduleScript(
        imports="\n".join(_imports(kind, schedule, choice, version)),
        layer=layer,
        recipe=functools.partial(_recipe, kind),
        region=f"te.{name}(enabled=True, {recipe}=recipe)",
        off=f"te.{name}(enabled=False)",
        checkpoint="te.checkpoint",
        backward="torch.autograd.backward",
        scales=_SCALES,
        listen=_LISTEN,
        pending=_PENDING.format(
            place=place,
            state="" if old else ".quantization_state",
            depth="FP8_AUTOCAST_DEPTH" if old else "autocast_depth",
        ),
        reset=_RESET.format(place=place),
        move=".cuda()",
        settings="\n".join(_switches(schedule)),
    )


def _switches(schedule: Schedule) -> Iterator[str]:
    """Environment variables that the library reads as it goes."""
    if not schedule.settings.fused:
        yield 'os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"'
    if any(isinstance(event, Reload) for event in schedule.events):
        yield 'os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"  # it loads its own file'
    if schedule.layer in ("layernorm_mlp", "transformer_layer"):
        yield 'os.environ["NVTE_BIAS_GELU_NVFUSION"] = "0"  # one kernel, checkpointed or not'


def _imports(kind: Kind, schedule: Schedule, choice: str, version: str) -> Iterator[str]:
    names = _names(kind, schedule.settings)
    yield _IMPORTS.format(choice=choice, version=version, recipe=names)
    if schedule.layer in _CALLS:
        block = 32 if kind == "mx" else 16
        yield _ADAPTED.format(call=_CALLS[schedule.layer].format(two=2 * block, one=block))
    if schedule.quantized_init:
        old = version.startswith("1.")
        init = "fp8_model_init()" if old else "quantized_model_init(recipe=recipe)"
        yield _QUANTIZED.format(init)
    switched = any(isinstance(e, Switch) and e.algorithm == "callable" for e in schedule.events)
    if schedule.settings.algorithm == "callable" or switched:
        yield _CALLABLE


_QUANTIZED = """\
def quantized(make):
    with te.{}:
        return make()"""

_CALLABLE = """\
def newest_or_largest(history):
    return history.amax(dim=0)"""


def _names(kind: Kind, settings: Settings) -> str:
    form = kind != "delayed" or settings.format != "hybrid"
    return f"{_RECIPES[kind]}, Format" if form else _RECIPES[kind]


def _options(spec: Spec) -> str:
    assert spec.schedule is not None
    bias = "" if spec.schedule.layer == "transformer_layer" else f"bias={spec.bias}, "
    return f'{bias}params_dtype=dtype, device="cuda"'


def _recipe(kind: Kind, settings: Settings) -> str:
    form = "HYBRID" if settings.format == "hybrid" else "E4M3"
    if kind != "delayed":
        form = "E4M3" if kind == "mx" else form
        return f"{_RECIPES[kind]}(fp8_format=Format.{form})"
    told = [f"amax_history_len={settings.history}"]
    if settings.margin:
        told.append(f"margin={settings.margin}")
    if settings.format != "hybrid":
        told.append("fp8_format=Format.E4M3")
    named = "newest_or_largest" if settings.algorithm == "callable" else repr(settings.algorithm)
    return f"DelayedScaling({', '.join(told)}, amax_compute_algo={named})".replace("'", '"')
