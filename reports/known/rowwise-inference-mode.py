"""float8 rowwise: a converted linear runs under no_grad and dies under inference_mode."""
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
def cannot(kind, error, trace):
    print(f"cannot tell: {kind.__name__}: {error}", flush=True)
    os._exit(125)
sys.excepthook = cannot
import dataclasses
import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

bad = untold = 0
for recipe, emulate in ((r, e) for r in ("tensorwise", "rowwise", "rowwise_with_gw_hp") for e in (False, True)):
    model = torch.nn.Sequential(torch.nn.Linear(64, 32)).bfloat16()
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    model = convert_to_float8_training(model, config=config)
    x = torch.randn(16, 64).bfloat16()
    recipe += ", emulated" if emulate else ", real"
    try:
        with torch.no_grad():
            expected = model(x)
    except RuntimeError as error:  # torch 2.11 multiplies no rows on a CPU
        untold += 1
        print(f"{recipe}: cannot run here: {error}")
        continue
    try:
        with torch.inference_mode():
            same = torch.equal(model(x), expected)
        print(f"{recipe}: inference_mode gives what no_grad gives: {same}")
    except AssertionError as error:
        bad += 1
        print(f"{recipe}: {error}")
sys.exit(1 if bad else 125 if untold else 0)
