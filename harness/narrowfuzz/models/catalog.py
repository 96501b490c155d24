"""The models by name.

A model is a class of ``play/models.py`` and a row here; all other code reads the row. Nothing here
imports torch before a model is built. A package's model is listed only if the package is installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any, Literal

from packaging.version import Version

from narrowfuzz.models.model import Arguments, Layer, Model, heads_of
from narrowfuzz.models.operators import OPERATORS


def _attention(spec: Any) -> Arguments:
    return spec.k, heads_of(spec), spec.attention == "flash"


def _block(spec: Any) -> Arguments:
    return spec.k, spec.n, heads_of(spec), spec.attention == "flash"


def _sides(spec: Any) -> Arguments:
    return spec.k, spec.n, spec.bias


def _rows_of_a_block(spec: Any) -> int:
    """The block size to multiples of which an expert's rows are padded: 128 if m, k and n are
    multiples of 128, else 32."""
    return 32 if any(size % 128 for size in (spec.m, spec.k, spec.n)) else 128


_LAYERS = ("layers.0", "layers.1")
#: How tensor parallelism shards a norm and a linear: each rank normalises some rows of a sequence.
_NORMED: tuple[tuple[str, Any], ...] = (("norm", "sequence"), ("proj", "colwise"))
_SEQUENCES: dict[str, dict[str, Any]] = {"tensor": {"sequence": True}}
#: Tensor-parallel ranks share only the experts; each has all of the model's other parts.
_BESIDE_EXPERTS: dict[str, dict[str, Any]] = {
    "tensor": {"sequence": False, "narrow_styles": False, "local_output": True}
}
_PARTS_OF_A_BLOCK = ("linear", "rmsnorm_linear", "mlp_swiglu", "attention")

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model(
            "linear", "one linear inside a container", "OneLinear", _sides, "linear",
            wide=True, pointwise=True, smaller=(), shared=(("proj", "either"),),
        ),
        Model(
            "mlp_gelu", "up, GELU, down", "GeluMLP", _sides, "mlp", last="down",
            shared=(("up", "colwise"), ("down", "rowwise")),
        ),
        Model(
            "mlp_swiglu", "SwiGLU feed-forward", "SwiGLU", _sides, "mlp", last="w2",
            shared=(("w1", "colwise"), ("w3", "colwise"), ("w2", "rowwise")),
        ),
        Model(
            "rmsnorm_linear", "RMSNorm and a linear", "NormLinear",
            lambda spec: ("rms", *_sides(spec)), "norm", wide=True, normalises=True, last="proj",
            shared=_NORMED, prescribed_sharding=_SEQUENCES,
        ),
        Model(
            "layernorm_linear", "LayerNorm and a linear", "NormLinear",
            lambda spec: ("layer", *_sides(spec)), "norm", wide=True, normalises=True, last="proj",
            shared=_NORMED, prescribed_sharding=_SEQUENCES,
        ),
        Model(
            "attention", "causal self-attention", "Attention", _attention, "block",
            attends=True, last="wo",
        ),
        Model(
            "llama_block", "RMSNorm, attention, RMSNorm, SwiGLU", "LlamaBlock", _block, "block",
            attends=True, normalises=True, parts=("attention", "feed_forward"), fragile=1,
            smaller=_PARTS_OF_A_BLOCK,
        ),
        Model(
            "two_blocks", "two Llama blocks, recomputed one by one", "TwoBlocks", _block, "block",
            attends=True, normalises=True, regions=_LAYERS, parts=_LAYERS, fragile=1,
            smaller=(*_PARTS_OF_A_BLOCK, "llama_block"),
        ),
        Model(
            "joined_blocks", "two Llama blocks, recomputed as one region", "TwoBlocks", _block,
            "block", attends=True, normalises=True, parts=_LAYERS, fragile=2,
            smaller=(*_PARTS_OF_A_BLOCK, "llama_block"),
        ),
        Model(
            "tied_embedding", "embedding whose weight is the head's too", "TiedHead",
            lambda spec: (spec.n, spec.k), "norm", wide=True, takes_ids=True, normalises=True,
            draw_weight=2, smaller=("linear", "rmsnorm_linear"),
        ),
        Model(
            "looped_experts", "a mixture of four experts in a loop, two for each row",
            "LoopedExperts", lambda spec: (spec.k, spec.n, 4, 2, _rows_of_a_block(spec)), "mlp",
            compiled=False,
            smaller=("linear", "mlp_swiglu"),
        ),
        Model(
            "grouped_experts", "three experts in groups of rows, one for each, and a shared one",
            "GroupedExperts", lambda spec: (spec.k, spec.n, 3, 1, True, True), "mlp", experts=3,
            branches=True, prescribed_sharding=_BESIDE_EXPERTS,
            fixed={"weight_layout": "contiguous"}, smaller=("linear", "mlp_swiglu"),
        ),
        Model(
            "chosen_experts", "four experts in groups of rows, two for each, and a shared one",
            "GroupedExperts", lambda spec: (spec.k, spec.n, 4, 2, False), "mlp", experts=4,
            branches=True, prescribed_sharding=_BESIDE_EXPERTS,
            fixed={"weight_layout": "contiguous"},
            smaller=("linear", "mlp_swiglu", "grouped_experts"),
        ),
        Model(
            "capacity_experts", "four experts of as many rows each, and a shared one",
            "CapacityExperts", lambda spec: (spec.k, spec.n, 4), "mlp", branches=True,
            fixed={"weight_layout": "contiguous"},
            smaller=("linear", "mlp_swiglu"),
        ),
        Model(
            "balanced_experts", "four experts, two for each row, whose router balances them",
            "BalancedExperts", lambda spec: (spec.k, spec.n, 4, 2), "mlp", experts=4,
            branches=True, changing=("router.counts",), changing_again=("router.counts",),
            saved_buffers=("router.counts",),
            prescribed_sharding=_BESIDE_EXPERTS, fixed={"weight_layout": "contiguous"},
            smaller=("linear", "mlp_swiglu", "chosen_experts"),
        ),
        Model(
            "dropout", "MLP with dropout", "DroppedOut", _sides, "mlp", random=True, last="down",
            draw_weight=2,
        ),
        Model(
            "used_twice", "one linear called twice", "UsedTwice",
            lambda spec: (spec.k, spec.bias), "mlp", draw_weight=2,
        ),
        Model(
            "frozen_first", "MLP whose first layer does not train", "FrozenFirst", _sides, "mlp",
            pointwise=True, last="second", shared=(("first", "colwise"), ("second", "rowwise")),
        ),
        Model(
            "hooked", "a linear with hooks and attributes", "Hooked", _sides, "norm",
            wide=True, pointwise=True, draw_weight=2,
        ),
        Model(
            "own_forward", "a subclass of nn.Linear with its own forward", "OwnForward", _sides,
            "norm", wide=True, pointwise=True,
        ),
    )
}  # fmt: skip


#: Names of the models of linears or of several operators, without single operators.
COMPOSED = tuple(MODELS)
MODELS.update((model.name, model) for model in OPERATORS)


def _titan_release() -> tuple[int, ...]:
    """The first two numbers of torchtitan's version; (0, 1) if it is not installed."""
    try:
        return Version(importlib.metadata.version("torchtitan")).release[:2]
    except importlib.metadata.PackageNotFoundError:
        return 0, 1


_OLD = _titan_release() < (0, 2)
#: From 0.3 on, a model is built from a tree of configurations, and has one linear for query, key
#: and value.
_CONFIGURED = _titan_release() >= (0, 3)
#: How torchtitan's tensor-parallel plan shards the linears of a block.
_TITAN_BLOCK: dict[str, Literal["colwise", "rowwise"]] = {
    **dict.fromkeys(
        ("attention.qkv_linear.wqkv",)
        if _CONFIGURED
        else ("attention.wq", "attention.wk", "attention.wv"),
        "colwise",
    ),
    "attention.wo": "rowwise",
    "feed_forward.w1": "colwise",
    "feed_forward.w3": "colwise",
    "feed_forward.w2": "rowwise",
}
_TITAN_LAST = "model.lm_head" if _CONFIGURED else "model.output"
#: Fields of a sharding that torchtitan's FSDP and its tensor-parallel plan prescribe by default:
#: logits stay sharded for the loss, and from 0.2 on the training loop divides gradients.
_TITAN_LAID: dict[str, dict[str, Any]] = {
    "data": {"units": "each", "reduces_fp32": True, "averages": _OLD, "gathers": "values"},
    "tensor": {"sequence": True, "local_output": False},
}


def _titan(
    name: str, title: str, flavor: str, width: int, vocabulary: int, *, blocks: int, **changes: Any
) -> Model:
    """A row for torchtitan's Llama 3 in the configuration ``flavor``, with these changes to it."""
    fixed = {
        "m": 128,
        "batch": 0,
        "k": width,
        "n": vocabulary,
        "heads": 1,
        "attention": "flash",
        "bias": False,
        "dynamic": False,
        "weight_layout": "contiguous",
    }
    return Model(
        name,
        title,
        "TorchtitanDecoder" if _CONFIGURED else "TorchtitanLlama",
        lambda spec: (flavor, spec.n, spec.m, changes),
        "block",
        wide=True,
        takes_ids=True,
        attends=True,
        normalises=True,
        last=_TITAN_LAST,
        regions=tuple(f"model.layers.{i}" for i in range(blocks)),
        smaller=(),
        fixed=fixed,
        package="torchtitan",
        compiled=blocks == 1,
        prescribed_sharding=_TITAN_LAID,
        shared=(
            *(
                (f"model.layers.{i}.{linear}", style)
                for i in range(blocks)
                for linear, style in _TITAN_BLOCK.items()
            ),
            (_TITAN_LAST, "colwise"),
        ),
    )


_BLOCK: dict[str, Any] = {
    "dim": 512,
    "n_layers": 1,
    "n_heads": 16,
    "n_kv_heads": 4,
    "multiple_of": 128,
}


#: Models of packages. The blocks have the proportions of the real ones, but are so narrow that a
#: step is fast; the debug model's vocabulary is that of its test tokenizer, padded from 0.2 on.
OF_PACKAGES: tuple[Model, ...] = (
    _titan(
        "titan_debug",
        "torchtitan's llama3 debug model",
        "debugmodel",
        256,
        2000 if _OLD else 2048,
        blocks=6,
    ),
    _titan(
        "titan_8b", "one block as in torchtitan's llama3 8B", "8B", 512, 2048, blocks=1, **_BLOCK
    ),
    _titan(
        "titan_405b",
        "one block with the feed-forward of torchtitan's llama3 405B",
        "405B",
        512,
        2048,
        blocks=1,
        **_BLOCK,
    ),
)
_HERE = {m.name: m for m in OF_PACKAGES if importlib.util.find_spec(m.package) is not None}
MODELS.update(_HERE)
COMPOSED += tuple(_HERE)
#: Name of a model -> the library's own layer that it is made of, simplest first. These layers
#: quantise inside regions and may keep scales between steps. Recipes declare which they carry.
LAYERS: dict[str, Layer] = {
    f"library_{layer.name}": layer
    for layer in (
        Layer("linear", bare=True),
        Layer("layernorm_linear"),
        Layer("rmsnorm_linear"),
        Layer("layernorm_mlp", last=("fc2_weight", "fc2_bias")),
        Layer("grouped_linear", last=(), updates_once=True),
        Layer("transformer_layer", last=()),
    )
}
LIBRARY: dict[str, str] = {name: layer.name for name, layer in LAYERS.items()}
#: Fields of a Spec that only converted models have, and those that only a library's layers have.
FIELDS_OF_CONVERTED = (
    "backend",
    "n",
    "batch",
    "input_layout",
    "grad_layout",
    "weight_layout",
    "heads",
    "attention",
    "autocast",
    "optimizer",
    "clipping",
    "lifecycle",
    "compile",
    "dynamic",
    "fullgraph",
    "memory_budget",
    "kernels",
    "threads",
)
FIELDS_OF_LIBRARY = ("layout", "depth", "quantized_init", "settings")


def of_kind(*kinds: str) -> tuple[str, ...]:
    """Names of the models of these kinds."""
    return tuple(name for name, model in MODELS.items() if model.kind in kinds)


#: Fields of a Spec that a user's own model determines, so that they are the same in all its cases.
FIXED_BY_OWN = frozenset(
    ("batch", "m", "k", "n", "heads", "attention", "bias", "dynamic", "dtype", "weight_layout")
)


def title_of(name: str) -> str:
    """FILE.py:build of a user's own model, without the arguments of build; "" for a shipped one."""
    called, own, _ = name.partition("#")
    return called.partition("(")[0] if own else ""


def unregistered(name: str) -> str:
    """The error message for a user's own model that is not registered; "" for any other."""
    title = title_of(name)
    if not title or name in MODELS:
        return ""
    return f"{title!r} is a user's model: name its file by --model FILE.py:build"


def unknown_model(name: str) -> str:
    """The error message for a name that no model can have; "" for a possible name."""
    if name in MODELS or name in LIBRARY or "#" in name:
        return ""
    if package := next((m.package for m in OF_PACKAGES if m.name == name), ""):
        return f"the model {name!r} is {package}'s own: run it by --with {package}==VERSION"
    return f"`$.spec.model` is {name!r}; known are {', '.join((*MODELS, *LIBRARY))}"


def takes_ids(name: str) -> bool:
    """True if the input of this model holds token ids."""
    return name in MODELS and MODELS[name].takes_ids
