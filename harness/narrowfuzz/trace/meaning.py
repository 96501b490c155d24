"""The first words of a finding: what a divergence means.

A symptom is part of a fingerprint and never changes; the text shown to the user is made here from
the symptom, the role and the address. A symptom that the tables do not have is shown as it is.
"""

from __future__ import annotations

import re
from typing import TypeAlias

from narrowfuzz.numerics.plan import OPERANDS
from narrowfuzz.play.names import name_of
from narrowfuzz.trace.address import At
from narrowfuzz.trace.expect import Expect, Is, Present, Same

_RESULTS = {
    "output": "output",
    "grad_input": "input gradient",
    "grad_weight": "weight gradient",
    "grad_bias": "bias gradient",
    "grad_parameter": "parameter gradient",
    "gradient": "gradient",
    "norm": "norm of the gradients",
    "clipped": "clipped gradient",
    "state": "optimizer state",
    "loss_scale": "scale of the loss",
    "buffer": "buffer",
    "parameter": "parameter",
}
_TENSORS = {
    "input": "input",
    "weight": "weight",
    "grad_output": "output gradient",
    "q": "query",
    "k": "key",
    "v": "value",
}
#: How the case was changed before it ran again, by the title of that run.
_AGAIN = {
    "permuted tokens": "when the tokens are permuted",
    "permuted outputs": "when the output features are permuted",
    "permuted inputs": "when K is permuted",
    "padded inputs": "when K is padded with zeros",
    "padded tokens": "when rows of zeros are appended to the batch",
    "the first half": "when the batch is split",
    "the second half": "when the batch is split",
    "input and weight exchanged": "when input and weight are exchanged",
    "contiguous copies": "when its tensors are made contiguous",
    "a flattened input": "when its input is flattened to 2-D",
    "after steps": "after optimizer steps with a learning rate of 0",
    "after reload": "after a save and reload",
    "after reload trusted": "after a save and reload",
}
#: The circumstances under which a result differs, by the title of the run it is compared with.
_BESIDE = {
    "without it": "with checkpointing",
    "uninterrupted": "after a save and reload",
    "alone in its process": "after other models ran in the same process",
    "in one process": "on ranks that share nothing",
}

#: Pattern of a symptom -> text. {result}, {operand}, {names}, {tensor}, {again} and {beside} are
#: filled from the address and the expectation, {argument} with the argument of an
#: autograd.Function; other names in braces are groups of the pattern.
_Table: TypeAlias = dict[str, str]
_CONVERSION: _Table = {
    "left unconverted": "conversion left a linear unquantised that it promises to convert",
    "second name left unconverted": "conversion quantised a shared linear under one name only",
    "converted unasked": "conversion quantised a module that it was not asked to convert",
    "own forward lost": "conversion replaced your module's forward",
    "forward changed": "conversion changed the forward of a module it should leave alone",
    "module type changed": "conversion changed the type of a module it should leave alone",
    "module missing": "conversion dropped a module",
    "module added": "conversion added a module",
    "shared module split": "conversion made two modules of one that is used twice",
    "training flag changed": "conversion changed train() or eval() of a module",
    "hooks lost": "conversion dropped the hooks of a module",
    "attributes lost": "conversion dropped attributes of a module",
    "attributes changed": "conversion changed attributes of a module",
    "tied weights untied": "conversion untied weights that were one parameter",
    "weights tied": "conversion tied weights that were two parameters",
    "parameter missing": "conversion dropped a parameter",
    "parameter added": "conversion added a parameter",
    "parameter type changed": "conversion changed the class of a parameter",
    "parameter shape changed": "conversion changed the shape of a parameter",
    "parameter dtype changed": "conversion changed the dtype of a parameter",
    "parameter device changed": "conversion moved a parameter to another device",
    "parameter order changed": "conversion changed the order of the parameters",
    "parameter hooks lost": "conversion dropped the hooks of a parameter",
    "parameter attributes lost": "conversion dropped attributes of a parameter",
    "requires_grad changed": "conversion changed which parameters require a gradient",
    "buffer missing": "conversion dropped a buffer",
    "buffer added": "conversion added a buffer",
    "buffer changed": "conversion changed a buffer",
    "state_dict keys changed": "conversion changed the keys of the state_dict",
    "not quantised on ranks": "conversion quantises nothing when the model runs on ranks",
}
_RAISES: _Table = {
    r"fails only under compile \((?P<error>.*)\)":
        "the model fails only when compiled, with {error}",
    r"fails only in recompute \((?P<error>.*)\)":
        "the model fails only with checkpointing: {error}",
    r"fails only on other kernels \((?P<error>.*)\)":
        "the model fails only without oneDNN, with {error}",
    r"fails only on ranks \((?P<error>.*)\)": "the model fails only on several ranks, with {error}",
    r"fails only on ranks, compiled \((?P<error>.*)\)":
        "the model fails only on several ranks and compiled, with {error}",
    r"fails although nothing forbids it \((?P<error>.*)\)":
        "the model fails although the library promises to run it, with {error}",
    r"memory written twice \((?P<error>.*)\)":
        "a kernel writes different values to one place: {error}",
    r"memory written outside \((?P<error>.*)\)":
        "a kernel writes outside of the memory of its arguments: {error}",
    r"unclear refusal of an empty dimension \((?P<error>.*)\)":
        "an empty dimension is refused without a clear message",
    r"refused only in backward \((?P<error>.*)\)":
        "a shape is refused only in backward, after forward has run",
    r"refusal states no rule \((?P<error>.*)\)":
        "the error does not say which rule is broken",
    r"refusal names no shape \((?P<error>.*)\)": "the error does not name the shape",
    r"refusal names no layer \((?P<error>.*)\)": "the error does not name the layer",
    r"cannot be loaded \((?P<error>.*)\)": "torch.load refuses the saved state_dict",
    r"cannot be restored \((?P<error>.*)\)": "the saved state_dict does not load into a new model",
    r"cannot go on \((?P<error>.*)\)": "training fails after an optimizer step",
    r"raises the second time": "the model fails when the same case is run again",
    r"hangs": "the process hangs",
    r"loses the device": "the run loses the device",
    r"(?P<error>[A-Z]\w+) in (?P<where>[\w.?<>]+)(, .*)?":
        "a training that the library promises to run fails with {error} in {where}",
    r"(?P<error>\w+ after other models.*)":
        "the model fails only after other models in one process: {error}",
}  # fmt: skip
_SYMPTOMS: _Table = {
    # results
    "wrong value": "{result} is wrong",
    "not finite": "{result} is not finite",
    "NaN missing": "{result} is a number where NaN must come out",
    "NaN from nowhere": "{result} is NaN although no operand makes it NaN",
    "wrong sum": "{result} is not a sum that this accumulator can return",
    "kernel multiplies wrongly": "a matrix product inside the compiled graph is wrong",
    "type under autocast": "{result} has the wrong dtype under autocast",
    "runs although it is documented to raise": "a call runs that the documentation says raises",
    "runs on ranks where one process raises": "ranks run what one process refuses",
    "accepts what its blocks do not divide": "a shape that its blocks do not divide is not refused",
    "differs on repeat": "{result} differs when the same case is run again",
    "depends on memory that nobody wrote": "{result} depends on uninitialised memory",
    "differs from no checkpoint": "{result} differs with checkpointing",
    "differs from eager": "{result} differs from eager",
    "gradient missing in one run": "{result} is missing in one of two runs",
    "error beyond eager's": "{result} is less accurate than eager allows",
    r"belongs to another forward.*": "the gradients do not belong to the forward that was run",
    "is not the sum of its layer's calls": "{result} is not the sum over the calls of its layer",
    r"no gradient of (?P<name>.*)": "{names} after backward",
    r"of (?P<name>.+) is not the derivative of its forward":
        "the backward of {name} gives a gradient of {argument} that is not the forward's",
    r"no .*": "{names} after backward",
    # casts and their operands
    "amax": "amax of {operand} is not its largest magnitude",
    "scale value": "scale of {operand} is wrong",
    "scale off by a factor 2": "scale of {operand} is off by a factor of two",
    r"scale byte \+1": "scale of {operand} is one power of two too large",
    r"scale byte -1": "scale of {operand} is one power of two too small",
    r"scale byte \+n": "scale of {operand} is several powers of two too large",
    r"scale byte -n": "scale of {operand} is several powers of two too small",
    "block scale": "block scale of {operand} is wrong",
    "scale of a granule with Inf or NaN":
        "scale of {operand} is wrong where it or the scale is Inf or NaN",
    "rounded code": "{operand} is rounded wrongly when it is quantised",
    "saturated code": "{operand} saturates wrongly when it is quantised",
    "NaN code": "{operand} is quantised to NaN, or a NaN of it is lost",
    "codes of an MX block with scale byte 0":
        "{operand} is quantised wrongly where the scale byte is 0",
    "dequantised value": "quantised copy of {operand} has a wrong value",
    r"(?P<format>e\dm\d) codes": "a tensor is quantised to wrong {format} codes",
    r"(?P<format>e\dm\d) scale": "a tensor is quantised to {format} with a wrong scale",
    r"(?P<format>e\dm\d) rounding":
        "a tensor that must be rounded stochastically to {format} is rounded by a rule",
    "is not monotone": "quantised copy of {operand} is smaller for a larger element",
    r"\w+ differs from the \w+ copy": "two quantised copies of one tensor disagree",
    "differs from another recipe's value":
        "quantised copy of {operand} differs from another recipe's",
    "requantises to another value": "quantising {operand} twice changes it",
    "depends on elements below amax":
        "quantised copy of {operand} depends on an unrelated smaller element",
    "leaks between granules":
        "quantised copy of {operand} depends on data outside its scaling block",
    "operand that no cast made": "a product multiplies codes of {operand} that no cast returned",
    "input quantised again in backward": "{operand} is quantised again in backward",
    "operand of another forward": "a product multiplies {operand} of another forward",
    "scale and inverse out of step":
        "{operand} is dequantised with another scale than it was cast with",
    # recompute and attention
    "scale differ in recompute": "scale of {operand} differs when backward recomputes it",
    "codes differ in recompute": "quantised copy of {operand} differs when backward recomputes it",
    "operands differ in recompute": "{operand} differs when backward recomputes it",
    r"recomputed with the scales of another call.*":
        "backward recomputes with the scales of another call",
    r"recomputed with another scale.*": "backward recomputes with another scale than forward used",
    r"recomputed in another precision.*": "backward recomputes in another precision than forward",
    r"recomputed other codes.*": "backward recomputes other codes than forward's",
    r"recomputed what the forward did not do.*": "backward recomputes what forward never did",
    "log-sum-exp of no forward": "attention's backward uses a log-sum-exp that no forward returned",
    "output of another forward": "attention's backward uses the output of another forward",
    "attention's inputs moved after forward":
        "{tensor} of attention changed between forward and backward",
    "probabilities do not sum to 1": "attention probabilities in backward do not sum to 1",
    "probabilities do not sum to 1 beside a large mask": (
        "attention probabilities in backward do not sum to 1 behind a large finite mask"
    ),
    # a related run, or the same run again
    "does not scale": "{result} does not scale when a tensor is multiplied by a power of two",
    "does not follow its operands": "{result} does not scale or change sign with its operands",
    "is not symmetric": "{result} is wrong when the input is negated",
    r"result changes.*": "{result} changes {again}",
    r"result leaves its bound.*": "{result} is wrong {again}",
    r"scale changes.*": "scale of {operand} changes {again}",
    r"codes changes.*": "quantised copy of {operand} changes {again}",
    r"operand changes.*": "quantised copy of {operand} changes {again}",
    "halves do not add up": "weight gradients of two half batches do not add up",
    "sum of halves leaves its bound": "weight gradients of two half batches do not add up",
    "depends on the bias": "{result} depends on the bias",
    "is not the sum with its bias": "{result} is not the result without a bias plus the bias",
    "is not the sum of the microbatches'": "{result} is not the sum of its microbatches'",
    r"changed by an evaluation.*": "{result} of a training is changed by an evaluation",
    r"changed by a reload.*": "{result} of a training is changed by a save and reload",
    r"changed by graphs that wait.*": "{result} changes when two graphs wait for their backwards",
    r"not what the definition of GradScaler leaves.*":
        "{result} of a training with GradScaler is not what its definition gives",
    "does not follow from the gradients of all ranks":
        "{result} on ranks does not follow from the gradients of all ranks",
    "another gradient the second time": "{result} differs when a kept graph runs backward again",
    # ranks
    "is not the ranks' sum": "{result} is not the sum over the ranks",
    "other shape": "{result} has another shape on ranks",
    "pieces make up no whole": "{result} on ranks is too short or too long when put together",
    "differs from one process": "{result} on ranks differs from one process",
    "differs between ranks": "{result} differs between ranks that hold the same",
    "differs from eager on ranks": "{result} of compiled ranks differs from eager ranks",
    "differs from threads": "{result} of ranks in processes differs from ranks in threads",
    "differs from the chain": "{result} of a pipeline differs from the same stages in one process",
    "differs from scales of the gather": "{result} changes with precomputed scales",
    "is not the gradients' norm": "{result} is wrong",
    "is not the clipped gradient": "{result} is wrong",
    "is not the optimizer's step": "{result} is wrong after a step",
    "is not the parameter of the last step":
        "{operand} that a linear uses on ranks after a step is not the parameter's",
    "is not what was saved":
        "{result} is not what was saved, after it was loaded on another layout",
    "differs from what the same state gives": "{result} differs after a resume on another layout",
    r"(?P<what>\w+) differs from the whole's":
        "{what} of {operand} on ranks differs from one process",
    r"(?P<what>\w+) of another shape": "{what} of {operand} on ranks has another shape",
    # a training with state
    "(?P<way>forward|backward) state(, .*)?": "{way} scaling state differs {beside}",
    "output": "{result} differs {beside}",
    "gradient": "{result} differs {beside}",
    "(?P<way>forward|backward) scale not updated.*": "{way} scale was not updated",
    "(?P<way>forward|backward) scale and window.*": "{way} scale and amax history are wrong",
    "(?P<way>forward|backward) scale(, .*)?": "{way} scale is wrong",
    "(?P<way>forward|backward) window.*": "{way} amax history is wrong",
    "(?P<way>forward|backward) staged maximum.*": "{way} amax set aside for the update is wrong",
    "(?P<way>forward|backward) maximum staged by (?P<by>an? \\w+).*":
        "{by} set a {way} amax aside that it should not",
    "(?P<way>forward|backward) state moved without a commit by (?P<by>an? \\w+).*":
        "{by} changed the {way} scaling state though no update was due",
    "(?P<way>forward|backward) state changed by (?P<by>an? \\w+).*":
        "{by} changed the {way} scaling state",
    "(?P<way>forward|backward) state kept.*": "a recipe without state keeps {way} scaling state",
    "(?P<way>forward|backward) cast with another scale than its slot's.*":
        "a {way} cast used another scale than its own",
    r"left over: (?P<what>.*)": "something is still set aside after the step: {what}",
    r"product in high precision \((?P<phase>\w+)\).*": "a product of {phase} ran in high precision",
    r"product in (?P<what>FP\d) \((?P<phase>\w+)\).*":
        "a product of {phase} outside {what} regions ran in {what}",
    r"scales of other blocks \((?P<phase>\w+)\)": "{operand} has scales for other blocks",
    r"product in other (?P<what>FP\d) formats \((?P<phase>\w+)\).*":
        "a product of {phase} ran in other {what} formats",
    "weight cast into a window that is gone": "the weight's amax goes to a history that is gone",
    "weight not cast": "the weight was not quantised again",
}  # fmt: skip
_EVERY = tuple(
    (re.compile(pattern), words)
    for table in (_CONVERSION, _RAISES, _SYMPTOMS)
    for pattern, words in table.items()
)


#: Python's name for a frame without a name of its own, such as ``f.<lambda>``.
_UNNAMED = re.compile(r"( in |\.)<(listcomp|setcomp|dictcomp|genexpr|lambda)>")


def meaning(role: str, symptom: str, at: At, expect: Expect | None) -> str:
    """What is wrong, in words for the user."""
    other = expect.at.run if isinstance(expect, Same) else ""
    for pattern, words in _EVERY:
        if found := pattern.fullmatch(symptom):
            return words.format(
                result=_result(role, at),
                operand=_operand(at, expect),
                names=_lacking(expect),
                tensor=_TENSORS.get(at.name, "an input"),
                argument=at.name or "its argument",
                again=_AGAIN.get(at.run, "when it is run again"),
                beside=_BESIDE.get(other, "between two runs"),
                **{name: _UNNAMED.sub("", group) for name, group in found.groupdict("").items()},
            )
    return symptom


def _result(role: str, at: At) -> str:
    """Words for a result, with the parameter's name or the number of the forward it belongs to."""
    name = name_of(at.name)
    if at.layer and at.name == "output" and role.startswith("grad"):
        role = "output"  # a gradient's difference was placed at the module in which it begins
    if role in ("grad_parameter", "gradient") and name.gradient_of:
        return f"gradient of {name.gradient_of}"
    if name.clipped_of:
        return f"clipped gradient of {name.clipped_of}"
    if name.buffer:
        return f"buffer {name.buffer}"
    if role in ("parameter", "state") and "." in name.kind:
        return f"{_RESULTS[role]} {name.kind}"
    which = f" {name.number}" if name.number and role in ("output", "grad_input") else ""
    return _RESULTS.get(role, role) + which


def operand(at: At) -> str:
    """Words for a quantised tensor and its use: ``the weight, as quantised for the ...``."""
    return _operand(at, None)


def _operand(at: At, expect: Expect | None) -> str:
    """Words for a quantised tensor, its use and, for an MX scale, its scaling block."""
    role = at.name if at.side else "output"
    side = OPERANDS[role][at.side == "b"][0] if role in OPERANDS and at.side else at.name  # type: ignore[index]
    tensor = f"the {_TENSORS[side]}" if side in _TENSORS else "an operand"
    if role in OPERANDS and role != "output":
        tensor += f", as quantised for the {_RESULTS[role]}"
    if at.what in ("scale", "amax") and len(at.index) == 2 and _block(at, expect):
        return f"{tensor} (row {at.index[0]}, block {at.index[1]})"
    return tensor


def _block(at: At, expect: Expect | None) -> bool:
    """Is the index of the address that of a block in a row? It is for MX scales, which are
    bytes."""
    return isinstance(expect, Is) and expect.byte


def _lacking(expect: Expect | None) -> str:
    """``a.weight and b.weight have no gradient``."""
    names = expect.names if isinstance(expect, Present) else ()
    lacking = [_parameter(name) for name in names if name != "output"]
    if not lacking:
        return "there is no output"
    shown = lacking[:3] + ([f"{len(lacking) - 3} more"] if lacking[3:] else [])
    text = " and ".join([", ".join(shown[:-1]), shown[-1]] if shown[1:] else shown)
    return f"{text} {'has' if len(lacking) == 1 else 'have'} no gradient"


def _parameter(name: str) -> str:
    if name.endswith(".grad"):
        return name.removesuffix(".grad")
    return f"the {name.removeprefix('grad_')}"


def place(at: At, expect: Expect | None) -> str:
    """Where a divergence was first seen (element, event, rank), without what ``meaning`` already
    states."""
    parts = [f"in {at.name}"] if at.what == "module" and at.name else []
    parts += [f"at {list(at.index)}"] if _pointed(at, expect) else []
    return ", ".join(parts + _when(at))


def _when(at: At) -> list[str]:
    parts = [f"in event {at.event}"] if at.event >= 0 else []
    parts += [f"in the {at.phase or 'forward'} of y{at.of}"] if at.of >= 0 else []
    parts += [f"on rank {at.rank}"] if at.rank else []
    return parts


#: Words for each recorded aspect of a product's operand.
_SEEN = {
    "source": "{}",
    "codes": "the quantised copy of {}",
    "cast": "the quantised copy of {}",
    "scale": "the scale of {}",
    "amax": "the amax of {}",
    "values": "what a product multiplies of {}",
    "significand": "the significand of the quantised copy of {}",
}


def located(at: At) -> str:
    """Words for a value and its complete address: ``the weight at [0, 3], in layers.0.wq, in
    recompute``."""
    if at.what in _SEEN and at.side:
        value = _SEEN[at.what].format(_operand(at, None))
    elif at.what in ("result", "product"):
        name = name_of(at.name)
        result = _result("gradient" if name.gradient_of else name.kind, at)
        value = f"the {name.part} {result}" if name.part else f"the {result}"
    elif at.what == "operator":
        value = f"{at.result or 'the result'} of {at.name}"
    else:
        value = " ".join(filter(None, (at.what, at.name)))
    value += f" at {list(at.index)}" * _pointed(at, None)
    parts = [f"in {at.layer}"] if at.layer else []
    parts += [f"call {at.call}"] if at.call else []
    parts += [f"in {at.phase}"] if at.phase and at.of < 0 else []
    parts += _when(at)
    return f"{at.run}: " * bool(at.run) + ", ".join((value, *parts))


def _pointed(at: At, expect: Expect | None) -> bool:
    if at.what in ("scale", "amax") and len(at.index) == 2 and _block(at, expect):
        return False
    return bool(at.index) and at.what != "state"


_MULTIPLE = re.compile(
    r"(?P<size>\w+)(?P<of> of .+?)? must be a multiple of (?P<rule>.+), "
    r"got (?P<got>\d+)(?P<more>.*)"
)


def broken(rule: str) -> str:
    """The shape rule that was broken, worded so that nobody takes it for the library's message:
    ``in_features=1 (must be a multiple of 32)``."""
    found = _MULTIPLE.fullmatch(rule)
    return _BROKEN.format_map(found.groupdict("")) if found else rule


_BROKEN = "{size}={got}{of} (must be a multiple of {rule}){more}"


def times(factor: float) -> str:
    """A multiple of the tolerance, with three digits, and below 1e7 without an exponent."""
    if factor >= 1e7:
        return f"{factor:.2g}"
    if factor >= 100:
        return str(int(float(f"{factor:.3g}")))
    return f"{factor:.3g}"


#: The most characters by which a text may exceed its limit so that its last word is complete.
_WORD = 40


def shortened(text: str, most: int) -> str:
    """The first ``most`` characters of a text, extended to the end of the word that they end in,
    and three dots where something was cut off."""
    rest = re.match(rf"\S{{0,{_WORD}}}", text[most:])
    assert rest is not None
    end = most + rest.end() if text[:most][-1:].strip() else most
    return text if end >= len(text.rstrip()) else f"{text[:end].rstrip()} ..."
