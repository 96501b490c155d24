"""LayerNormMLP with MXFP8, blockwise FP8 or NVFP4 parameters does not run outside autocast; Linear and LayerNormLinear do."""
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
def cannot(kind, error, trace):
    print(f"cannot run: {kind.__name__}: {error}", flush=True)
    os._exit(125)
sys.excepthook = cannot
import torch
if not torch.cuda.is_available():  # elsewhere TransformerEngine's own extension runs
    os.environ.setdefault("TE_ON_CPU_VERSION", "2.20.2")
    from te_on_cpu.environment import enter
    enter()
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

import transformer_engine
VERSION = tuple(int(part) for part in transformer_engine.__version__.split(".")[:2])
model_init = getattr(te, "quantized_model_init", None) or te.fp8_model_init  # until 2.8
def autocast(recipe):
    return te.autocast(recipe=recipe) if hasattr(te, "autocast") else te.fp8_autocast(fp8_recipe=recipe)

def make(recipe, layer, *sizes):
    with model_init(recipe=recipe):
        return layer(*sizes, params_dtype=torch.bfloat16, device="cuda")

made = [recipes.MXFP8BlockScaling(), recipes.Float8BlockScaling()]
if VERSION >= (2, 14):  # the emulation has NVFP4 from 2.14 on
    made.append(recipes.NVFP4BlockScaling(disable_stochastic_rounding=True))
x, shown = torch.ones(32, 32, device="cuda", dtype=torch.bfloat16), False
for recipe in made:
    make(recipe, te.Linear, 32, 32)(x)
    make(recipe, te.LayerNormLinear, 32, 32)(x)
    mlp = make(recipe, te.LayerNormMLP, 32, 64)
    with autocast(recipe):
        mlp(x)
    name = type(recipe).__name__
    print(f"{name}: Linear and LayerNormLinear run, and LayerNormMLP inside autocast")
    try:
        mlp(x)
        print("LayerNormMLP runs outside")
    except Exception as error:
        shown |= any(part in str(error) for part in ("cannot multiply", "scaling modes", "_data_format"))
        print("LayerNormMLP must run outside, too, got", type(error).__name__ + ":", str(error).splitlines()[0])
sys.exit(1 if shown else 0)
