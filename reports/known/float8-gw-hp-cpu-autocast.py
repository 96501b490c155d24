"""float8 rowwise_with_gw_hp under CPU autocast: backward multiplies bf16 by fp32; rowwise runs."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import dataclasses
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training, Float8LinearConfig

torch.set_num_threads(1)
torch.manual_seed(0)
bad = untold = 0
for name in ("rowwise", "rowwise_with_gw_hp"):
    for emulate in (False, True):
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(name), emulate=emulate)
        model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 32)), config=config)
        x = torch.randn(16, 64, requires_grad=True)
        try:
            with torch.autocast("cpu", torch.bfloat16):
                y = model(x)
        except RuntimeError as error:  # torch 2.11 multiplies no rows on a CPU
            untold += 1
            print(f"{name}, {'emulated' if emulate else 'real'}: cannot run here: {error}")
            continue
        try:
            y.sum().backward()
            said = "runs"
        except RuntimeError as error:
            said, bad = f"backward raises: {error}", bad + 1
        print(f"{name}, {'emulated' if emulate else 'real'}: output {y.dtype}, {said}")
sys.exit(1 if bad else 125 if untold else 0)
