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
from transformer_engine.common.recipe import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling

def make(recipe, layer, *sizes):
    with te.quantized_model_init(recipe=recipe):
        return layer(*sizes, params_dtype=torch.bfloat16, device="cuda")

fp4 = NVFP4BlockScaling(disable_stochastic_rounding=True)
x, shown = torch.ones(32, 32, device="cuda", dtype=torch.bfloat16), False
for recipe in (MXFP8BlockScaling(), Float8BlockScaling(), fp4):
    make(recipe, te.Linear, 32, 32)(x)
    make(recipe, te.LayerNormLinear, 32, 32)(x)
    mlp = make(recipe, te.LayerNormMLP, 32, 64)
    with te.autocast(recipe=recipe):
        mlp(x)
    name = type(recipe).__name__
    print(f"{name}: Linear and LayerNormLinear run, and LayerNormMLP inside autocast")
    try:
        mlp(x)
        print("LayerNormMLP runs outside")
    except Exception as error:
        shown |= "cannot multiply" in str(error) or "scaling modes" in str(error)
        print("LayerNormMLP must run outside, too, got", type(error).__name__ + ":", str(error).splitlines()[0])
sys.exit(1 if shown else 0)
