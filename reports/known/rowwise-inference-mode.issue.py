import contextlib

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

x = torch.randn(32, 2, 64, dtype=torch.bfloat16)
cases = {
    "no_grad": (torch.no_grad(), x),
    "inference_mode": (torch.inference_mode(), x),
    "x.transpose(0, 1)": (contextlib.nullcontext(), x.transpose(0, 1)),
}
for recipe in ("tensorwise", "rowwise"):
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, dtype=torch.bfloat16))
    config = Float8LinearConfig.from_recipe_name(recipe)
    model = convert_to_float8_training(model, config=config)
    for name, (mode, values) in cases.items():
        try:
            with mode:
                model(values)
            print(f"{recipe}, {name}: ok")
        except AssertionError as error:
            print(f"{recipe}, {name}: {error}")
