"""Cases: strict on the way in, canonical on the way out."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from narrowfuzz.case.events import Backward, Close, Forward, Open, Reload, Settings, Step
from narrowfuzz.case.sharding import Sharding
from narrowfuzz.case.spec import (
    MAX_CASE_BYTES,
    SCHEMA,
    Case,
    DataSpec,
    Spec,
    Spike,
    compile_key,
    dump_case,
    load_case,
)

EXAMPLES = settings(max_examples=200, deadline=None, database=None, derandomize=True)
SIMPLEST = Case(spec=Spec(recipe="torch.fp32"), data=DataSpec())
RICH = Case(
    spec=Spec(
        recipe="torchao.mxfp8.rceil", backend="wrapper", m=0, k=4096, n=1, batch=3, bias=True,
        dtype="fp32", input_layout="strided", grad_layout="expanded", checkpoint="reentrant",
        compile="inductor",
    ),
    data=DataSpec(
        regime="lattice", values="inf_nan", seed=2**32 - 1, input_exponent=-60, weight_exponent=60,
        grad_exponent=1, spikes=(Spike("bias", 0, 1 << 20, "0x7fc00000"),) * 16,
    ),
)  # fmt: skip
MODEL = Case(
    spec=Spec(
        recipe="torch.bf16", model="two_blocks", heads=4, attention="math", steps=5,
        microbatches=3, optimizer="adamw", lifecycle="reload", checkpoint="selective",
        compile="aot_eager_decomp_partition", dynamic=True, fullgraph=True, memory_budget=0,
    ),
    data=DataSpec(seed=1),
)  # fmt: skip


def edited(path: str, value: Any) -> bytes:
    """The rich case as JSON with one field replaced."""
    raw = json.loads(dump_case(RICH))
    *parents, last = path.split(".")
    node = raw
    for name in parents:
        node = node[int(name)] if isinstance(node, list) else node[name]
    node[int(last) if isinstance(node, list) else last] = value
    return json.dumps(raw).encode()


def complaint(raw: bytes) -> str:
    """The one sentence of the ValueError; exactly that type, so no decoder's own error leaks."""
    with pytest.raises(ValueError, match="case") as caught:
        load_case(raw)
    assert type(caught.value) is ValueError, repr(caught.value)
    text = str(caught.value)
    assert text and "\n" not in text
    return text


@pytest.mark.parametrize("case", [SIMPLEST, RICH, MODEL], ids=("simplest", "rich", "model"))
def test_a_case_survives_a_round_trip(case: Case) -> None:
    assert load_case(dump_case(case)) == case
    assert dump_case(load_case(dump_case(case))) == dump_case(case)


def test_ids_are_pinned_because_reports_and_ledgers_quote_them() -> None:
    assert SIMPLEST.id == "188fb63fb3a9"
    assert RICH.id == "410351aa48a6"
    assert MODEL.id == "2d2fb550b8b1"


@pytest.mark.parametrize("case", [SIMPLEST, RICH, MODEL], ids=("simplest", "rich", "model"))
def test_a_default_spelled_out_or_left_out_changes_no_id(case: Case) -> None:
    """So a field that a later version adds leaves every id of today as it is."""
    told = json.loads(dump_case(case))
    spelled = {**told, **{part: whole(getattr(case, part)) for part in ("spec", "data")}}
    assert len(spelled["spec"]) == len(Spec.__struct_fields__) > len(told["spec"])
    loaded = load_case(json.dumps(spelled).encode())
    assert (loaded, loaded.id, dump_case(loaded)) == (case, case.id, dump_case(case))


def whole(struct: Any) -> dict[str, Any]:
    """Every field of a Spec or DataSpec as JSON, defaults too."""
    return json.loads(msgspec.json.encode(struct))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", [f for f in Spec.__struct_fields__ if f != "recipe"])
def test_every_field_of_the_spec_that_is_not_at_its_default_is_told(name: str) -> None:
    value = {"backend": "wrapper", "bias": True, "autocast": True, "dynamic": True,
             "fullgraph": True, "dtype": "fp32", "batch": 2, "memory_budget": 50, "steps": 3,
             "microbatches": 2, "heads": 2, "depth": 2, "quantized_init": True,
             "settings": Settings(margin=1), "sharding": Sharding(data=2),
             "events": (Forward(), Backward(of=(0,)))}.get(name) or {
             "model": "dropout", "m": 7, "k": 7, "n": 7, "input_layout": "strided",
             "grad_layout": "expanded", "weight_layout": "transposed", "attention": "math",
             "grad_mode": "no_grad", "optimizer": "adamw", "loss_scaling": "grad_scaler",
             "clipping": "norm", "lifecycle": "reload",
             "checkpoint": "selective",
             "wraps": "each",
             "layout": "twice", "compile": "aot_eager", "kernels": "both",
             "threads": 4}[name]  # fmt: skip
    case = Case(spec=Spec(recipe="torch.fp32", **{name: value}), data=DataSpec())
    told = json.loads(msgspec.json.encode(value))
    assert json.loads(dump_case(case))["spec"] == {"recipe": "torch.fp32", name: told}
    assert load_case(dump_case(case)) == case
    assert case.id != SIMPLEST.id


def test_the_id_depends_on_content_and_not_on_spelling() -> None:
    raw = json.loads(dump_case(RICH))
    shuffled = json.dumps(dict(reversed(raw.items())), indent=4).encode()
    assert load_case(shuffled).id == RICH.id
    assert load_case(edited("data.seed", 1)).id != RICH.id


def test_missing_fields_take_the_simplest_value() -> None:
    assert load_case(b'{"schema":5,"spec":{"recipe":"torch.fp32"},"data":{}}') == SIMPLEST


def test_a_case_of_schema_1_means_what_it_meant() -> None:
    """All its fields were written out; those that came later take the simplest value."""
    old = load_case(
        b'{"data":{"grad_exponent":0,"input_exponent":0,"regime":"wild","seed":0,"spikes":[],'
        b'"values":"gaussian","weight_exponent":0},"schema":1,"spec":{"backend":"","batch":0,'
        b'"bias":false,"checkpoint":"none","compile":"none","dtype":"bf16","grad_layout":'
        b'"contiguous","input_layout":"contiguous","k":32,"m":32,"model":"linear","n":32,'
        b'"recipe":"torch.fp32"}}'
    )
    assert (old.spec, old.data, old.id) == (SIMPLEST.spec, SIMPLEST.data, SIMPLEST.id)
    assert load_case(dump_case(old)) == old


#: What happened to a library's layers as cases of schemas 2 to 5 told it, and the same in today's
#: fields.
SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (
        {"events": [{"type": "open"}, {"type": "forward"}, {"type": "close"}]},
        {"model": "library_linear", "events": (Open(), Forward(), Close())},
    ),
    "nested by torch, reentrant": (
        {
            "events": [{"type": "forward", "inside": True, "shift": 3},
                       {"type": "backward", "of": [0], "values": "spike"}],
            "layer": "layernorm_mlp", "depth": 2, "checkpoint": "nested",
            "checkpoint_by": "torch", "reentrant": True,
        },
        {
            "events": (Forward(inside=True, shift=3), Backward(of=(0,), values="spike")),
            "model": "library_layernorm_mlp", "depth": 2, "checkpoint": "by_torch_reentrant",
            "wraps": "nested",
        },
    ),
    "each by the library": (
        {"events": [], "layout": "twice", "checkpoint": "each"},
        {"model": "library_linear", "layout": "twice", "checkpoint": "full", "wraps": "each"},
    ),
    "whole, reentrant": (
        {"events": [], "checkpoint": "whole", "reentrant": True},
        {"model": "library_linear", "checkpoint": "reentrant"},
    ),
    "by torch": (
        {"events": [], "checkpoint": "each", "checkpoint_by": "torch"},
        {"model": "library_linear", "checkpoint": "by_torch", "wraps": "each"},
    ),
    "whose checkpoint it was where there was none": (
        {"events": [], "checkpoint": "none", "checkpoint_by": "torch", "reentrant": True},
        {"model": "library_linear"},
    ),
    "settings and all defaults spelled out": (
        {
            "events": [{"type": "reload"}, {"type": "step"}], "layer": "grouped_linear",
            "layout": "chain", "depth": 1, "checkpoint": "none", "checkpoint_by": "library",
            "reentrant": False, "quantized_init": True,
            "settings": {"history": 2, "algorithm": "most_recent", "fused": False},
        },
        {
            "events": (Reload(), Step()), "model": "library_grouped_linear",
            "quantized_init": True,
            "settings": Settings(history=2, algorithm="most_recent", fused=False),
        },
    ),
    "none": ({}, {}),
}  # fmt: skip


def older(schedule: Any, schema: int = 5, **more: Any) -> dict[str, Any]:
    """A case of an older schema with a schedule."""
    spec = {"recipe": "reference.delayed", "m": 16, "bias": True, "schedule": schedule}
    return {"schema": schema, "spec": spec, "data": {"seed": 7}, **more}


def today(fields: dict[str, Any], history: tuple[Case, ...] = ()) -> Case:
    spec = Spec(recipe="reference.delayed", m=16, bias=True, **fields)
    return Case(spec=spec, data=DataSpec(seed=7), history=history)


@pytest.mark.parametrize("schema", [2, 5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_an_older_case_is_read_in_todays_fields(name: str, schema: int) -> None:
    schedule, fields = SCHEDULES[name]
    loaded = load_case(json.dumps(older(schedule or None, schema)).encode())
    assert loaded == today(fields)
    assert loaded.id == today(fields).id
    told = json.loads(dump_case(loaded))
    assert told["schema"] == SCHEMA == 6 and "schedule" not in told["spec"]
    assert load_case(dump_case(loaded)) == loaded


def test_a_schedule_inside_an_older_history_is_read_in_todays_fields() -> None:
    schedules, fields = zip(*SCHEDULES.values(), strict=True)
    earlier = [older(schedule or None) for schedule in schedules]
    loaded = load_case(json.dumps(older(schedules[1], history=earlier)).encode())
    assert loaded == today(fields[1], tuple(today(one) for one in fields))
    assert [one["schema"] for one in json.loads(dump_case(loaded))["history"]] == [6] * len(earlier)
    assert load_case(dump_case(loaded)) == loaded


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        ({"events": [], "layer": "convolution"}, "'convolution' - at `$.spec.schedule.layer`"),
        ({"events": [], "layer": 1}, "`$.spec.schedule.layer`"),
        ({"events": [], "colour": 1}, "unknown field `colour` - at `$.spec.schedule`"),
        ({"events": [], "m": 64}, "unknown field `m` - at `$.spec.schedule`"),
        ({"events": [], "checkpoint": "full"}, "'full' - at `$.spec.schedule.checkpoint`"),
        ({"events": [], "checkpoint": ["each"]}, "`$.spec.schedule.checkpoint`"),
        ({"events": [], "checkpoint_by": []}, "`$.spec.schedule.checkpoint_by`"),
        ({"events": [], "reentrant": 1}, "`$.spec.schedule.reentrant`"),
        ({"layer": "linear"}, "missing required field `events` - at `$.spec.schedule`"),
        ({"events": 5}, "`$.spec.events`"),
        ({"events": [{"type": "jump"}]}, "`$.spec.events[0]"),
        ({"events": [], "depth": 4}, "<= 3 - at `$.spec.depth`"),
        ({"events": [], "settings": {"history": 0}}, "`$.spec.settings.history`"),
        ([], "got `array` - at `$.spec.schedule`"),
        (5, "got `int` - at `$.spec.schedule`"),
        ("events", "got `str` - at `$.spec.schedule`"),
    ],
)
def test_a_schedule_that_never_was_one_is_refused_by_name(schedule: Any, says: str) -> None:
    raw = older(schedule)
    assert says in complaint(json.dumps(raw).encode())
    inside = older(None, history=[raw])
    assert says.replace("$.", "$.history[0].") in complaint(json.dumps(inside).encode())


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("spec", 5, "`$.spec`"),
        ("history", 5, "`$.history`"),
        ("history", {"spec": {}}, "`$.history`"),
        ("history", [5], "`$.history[0]`"),
        ("data", 5, "`$.data`"),
    ],
)
def test_any_other_part_of_an_older_case_is_refused_by_name(
    path: str, value: Any, says: str
) -> None:
    assert says in complaint(json.dumps(older(SCHEDULES["plain"][0]) | {path: value}).encode())


def test_a_case_of_today_has_no_schedule() -> None:
    raw = json.dumps(older(SCHEDULES["plain"][0], SCHEMA)).encode()
    assert "unknown field `schedule`" in complaint(raw)


def test_compile_key_ignores_data_and_nothing_of_the_spec() -> None:
    assert compile_key(SIMPLEST.spec) == compile_key(load_case(dump_case(SIMPLEST)).spec)
    assert compile_key(SIMPLEST.spec) != compile_key(Spec(recipe="torch.fp32", m=33))


def test_a_dynamic_program_serves_any_number_of_rows_and_nothing_else() -> None:
    spec = Spec(recipe="torch.fp32", compile="aot_eager", dynamic=True)
    taller, wider = (msgspec.structs.replace(spec, **d) for d in ({"m": 96}, {"k": 96}))
    assert compile_key(taller) == compile_key(spec) != compile_key(wider)
    assert compile_key(msgspec.structs.replace(spec, dynamic=False)) != compile_key(spec)


@pytest.mark.parametrize(
    "changes", [{"model": "dropout"}, {"steps": 2}, {"microbatches": 2}, {"autocast": True}]
)
def test_only_one_linear_run_once_is_direct(changes: dict[str, Any]) -> None:
    assert SIMPLEST.spec.direct
    assert not msgspec.structs.replace(SIMPLEST.spec, **changes).direct


def test_a_models_output_is_as_wide_as_its_last_layer() -> None:
    def width(model: str) -> int:
        return Spec(recipe="r", model=model, k=3, n=5).width  # type: ignore[arg-type]

    assert [width(m) for m in ("linear", "tied_embedding", "hooked")] == [5, 5, 5]
    assert [width(m) for m in ("mlp_gelu", "attention", "used_twice")] == [3, 3, 3]


def test_shapes_follow_from_the_dimensions() -> None:
    flat, batched = Spec(recipe="r", m=3, k=4, n=5), Spec(recipe="r", m=3, k=4, n=5, batch=2)
    assert (flat.tokens, flat.input_shape, flat.output_shape) == (3, (3, 4), (3, 5))
    assert (batched.tokens, batched.input_shape, batched.output_shape) == (6, (2, 3, 4), (2, 3, 5))


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("colour", 1, "unknown field `colour`"),
        ("spec.gpu", 1, "unknown field `gpu`"),
        ("data.spikes.0.extra", 1, "unknown field `extra`"),
        ("spec.recipe", 7, "$.spec.recipe"),
        ("spec.m", "32", "$.spec.m"),
        ("spec.m", 32.0, "$.spec.m"),
        ("spec.m", True, "$.spec.m"),
        ("spec.m", None, "$.spec.m"),
        ("spec.m", -1, "$.spec.m"),
        ("spec.k", 4097, "<= 4096"),
        ("spec.n", 10**30, "$.spec.n"),
        ("spec.batch", 257, "<= 256"),
        ("spec.bias", 1, "$.spec.bias"),
        ("spec.dtype", "fp8", "$.spec.dtype"),
        ("spec.model", "mlp", "$.spec.model"),
        ("spec.input_layout", "expanded", "$.spec.input_layout"),
        ("spec.grad_layout", "strided", "$.spec.grad_layout"),
        ("spec.heads", 3, "$.spec.heads"),
        ("spec.steps", 0, ">= 1"),
        ("spec.steps", 6, "<= 5"),
        ("spec.microbatches", 4, "<= 3"),
        ("spec.memory_budget", 10, "$.spec.memory_budget"),
        ("spec.grad_mode", "eval", "$.spec.grad_mode"),
        ("spec.lifecycle", "pickle", "$.spec.lifecycle"),
        ("spec.dynamic", 1, "$.spec.dynamic"),
        ("spec.checkpoint", "half", "$.spec.checkpoint"),
        ("spec.compile", "eager", "$.spec.compile"),
        ("spec", [], "$.spec"),
        ("data.regime", "tame", "$.data.regime"),
        ("data.values", "uniform", "$.data.values"),
        ("data.seed", 2**32, "$.data.seed"),
        ("data.seed", -1, "$.data.seed"),
        ("data.input_exponent", 61, "<= 60"),
        ("data.grad_exponent", -61, ">= -60"),
        ("data.spikes", [{}] * 17, "$.data.spikes"),
        ("data.spikes.0.tensor", "output", "tensor"),
        ("data.spikes.0.row", (1 << 20) + 1, "row"),
        ("data.spikes.0.bits", "0x7F800000", "bits"),
        ("data.spikes.0.bits", "0x7f8", "bits"),
        ("data.spikes.0.bits", "0x7f800000\n", "bits"),  # would give one case two ids
        ("data.spikes.0.bits", 1, "bits"),
        ("schema", SCHEMA + 1, "update narrowfuzz"),
        ("schema", 0, "the first schema is 1"),
        ("schema", -3, "the first schema is 1"),
        ("schema", "1", "$.schema"),
        ("schema", None, "$.schema"),
    ],
)  # fmt: skip
def test_a_bad_field_is_refused_by_name(path: str, value: Any, says: str) -> None:
    assert says in complaint(edited(path, value))


@pytest.mark.parametrize("missing", ["schema", "spec", "data", "spec.recipe"])
def test_a_missing_field_is_refused_by_name(missing: str) -> None:
    raw = json.loads(dump_case(SIMPLEST))
    *parents, last = missing.split(".")
    del (raw[parents[0]] if parents else raw)[last]
    assert last in complaint(json.dumps(raw).encode())


#: A dimension that is not the default, so that it is written out.
TALL = Case(spec=Spec(recipe="torch.fp32", m=33), data=DataSpec())
GOOD = dump_case(TALL)


def spoilt(old: bytes, new: bytes) -> bytes:
    assert old in GOOD
    return GOOD.replace(old, new)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b"1",
        b'"case"',
        b"[" * 100_000,
        b'{"schema":1,"x":' + b"[" * 100_000,
        b'{"schema":1,"spec":' + b'{"recipe":' * 100_000,
        b'{"schema":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        GOOD + b"{}",
        b"\xef\xbb\xbf" + GOOD,
        spoilt(b'"m":33', b'"m":NaN'),
        spoilt(b'"m":33', b'"m":Infinity'),
        spoilt(b'"m":33', b'"m":1e400'),
        spoilt(b'"m":33', b'"m":0x20'),
        b'{"schema":' + b"9" * 5000 + b"}",
        b"\xff\xfe" + GOOD,
        spoilt(b"torch.fp32", b"\xff\xfe"),
        spoilt(b'"recipe"', b'"\xff"'),
        spoilt(b"torch.fp32", b"\\ud800"),
        GOOD.decode().encode("utf-16"),
        b"\0" * 100,
        b" " * (MAX_CASE_BYTES + 1),
    ],
    ids=lambda raw: f"{len(raw)}:{raw[:24]!r}",
)  # fmt: skip
def test_what_is_no_json_case_at_all_is_refused_in_one_sentence(raw: bytes) -> None:
    assert "case" in complaint(raw)


def test_a_truncated_case_is_refused_wherever_it_is_cut() -> None:
    for cut in range(len(GOOD)):
        complaint(GOOD[:cut])


def test_an_error_message_never_grows_with_the_file() -> None:
    # the sentence goes to terminals and logs; it must not carry the input back
    for raw in (b'{"schema":' + b"9" * 4000 + b"}", spoilt(b"fp32", b"x" * 4000)[:-9]):
        assert len(complaint(raw)) < 500


def test_the_size_limit_is_said_in_bytes() -> None:
    assert str(MAX_CASE_BYTES) in complaint(b"{" + b" " * MAX_CASE_BYTES)


def test_a_file_just_under_the_limit_is_read() -> None:
    assert load_case(GOOD + b" " * (MAX_CASE_BYTES - len(GOOD))) == TALL


@EXAMPLES
@given(st.binary(max_size=64), st.integers(0, len(GOOD)), st.integers(0, 8))
def test_damaged_bytes_never_raise_anything_but_value_error(
    junk: bytes, at: int, removed: int
) -> None:
    assert error_of(GOOD[:at] + junk + GOOD[at + removed :]) in (None, ValueError)


OLD = json.dumps(older(SCHEDULES["nested by torch, reentrant"][0])).encode()


@EXAMPLES
@given(st.binary(max_size=64), st.integers(0, len(OLD)), st.integers(0, 8))
def test_damaged_bytes_of_an_older_case_raise_nothing_else_either(
    junk: bytes, at: int, removed: int
) -> None:
    assert error_of(OLD[:at] + junk + OLD[at + removed :]) in (None, ValueError)


def error_of(raw: bytes) -> type[Exception] | None:
    try:
        load_case(raw)
    except ValueError as error:  # its subclasses are decoders' own errors: told apart by type
        return type(error)
    return None


@pytest.mark.parametrize(
    ("path", "known"),
    [("data.values", "heavy_tail"), ("spec.model", "tied_embedding"), ("spec.dtype", "fp16")],
)
def test_a_value_that_does_not_exist_is_named_with_those_that_do(path: str, known: str) -> None:
    text = complaint(edited(path, "nope"))
    assert "'nope'" in text and path in text and known in text


def test_what_said_nothing_beside_a_schedule_is_left_out_of_an_older_case() -> None:
    """A library's layers were run eagerly whatever the Spec's other fields were."""
    mute = {"n": 8, "compile": "inductor", "steps": 3, "model": "mlp_gelu"}
    said = {"recipe": "r", "m": 16, "schedule": {"events": []}, **mute}
    raw = {"schema": 4, "data": {}, "spec": said}
    assert load_case(json.dumps(raw).encode()).spec == Spec(
        recipe="r", model="library_linear", m=16
    )
