"""The float64 twin of a model: unquantised, never compiled, on the same data and schedule.

It is the reference for everything but the quantised GEMMs; those have one of their own.
"""

from __future__ import annotations

import numpy as np
import torch

from narrowfuzz.arms.tensors import host
from narrowfuzz.case import LEARNING_RATE, Spec
from narrowfuzz.models.zoo import MODELS, tied_names
from narrowfuzz.numerics.formats import F32, F64


def twin_outputs(spec: Spec, tensors: dict[str, F32]) -> dict[str, F64]:
    """What the Spec's schedule gives in float64, under the names a Trace uses.

    Only the rows' order matters, not their layout; gradients are the last step's.
    """
    description = MODELS[spec.model]
    model = description.build(spec, dtype=torch.float64, device="cpu")
    tied = tied_names(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = tensors[tied.get(name, name)].astype(np.float64)
            parameter.copy_(torch.from_numpy(values))
    trained = [p for p in model.parameters() if p.requires_grad]
    kind = torch.optim.SGD if spec.optimizer == "sgd" else torch.optim.AdamW
    optimizer = kind(trained, lr=LEARNING_RATE[spec.optimizer])
    grad = torch.from_numpy(tensors["grad_output"].astype(np.float64)).reshape(spec.output_shape)
    for step in range(spec.steps):
        if step:
            optimizer.zero_grad()
        for microbatch in range(spec.microbatches):
            rows = np.roll(tensors["input"], step * spec.microbatches + microbatch, axis=0)
            if description.takes_ids:
                x = torch.from_numpy(rows.astype(np.int64)).reshape(spec.input_shape[:-1])
            else:
                x = torch.from_numpy(rows.astype(np.float64)).reshape(spec.input_shape)
                x.requires_grad_(spec.trains)
            output = model(x)
            if spec.trains:
                output.backward(grad)
        if spec.steps > 1 and spec.trains:
            optimizer.step()
    named = {"output": host(output.reshape(spec.tokens, spec.width))}
    if x.grad is not None:
        named["grad_input"] = host(x.grad.reshape(spec.tokens, spec.k))
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            named[f"{name}.grad"] = host(parameter.grad)
        if spec.steps > 1:
            named[name] = host(parameter)
    return named
