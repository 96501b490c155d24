"""LayerNormLinear with q, k and v of their own cannot go on with another amax_history_len."""
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
from transformer_engine.common.recipe import DelayedScaling

def autocast(recipe, enabled=True):
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)  # what 1.x calls it

os.environ["NVTE_FLASH_ATTN"] = os.environ["NVTE_FUSED_ATTN"] = "0"
options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": False}
model = te.TransformerLayer(32, 64, 2, params_dtype=torch.bfloat16, **options)
x = torch.ones(16, 2, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
with autocast(DelayedScaling(amax_history_len=4)):
    model(x)
print("amax_history_len=4: runs")
raised = None
try:
    with autocast(DelayedScaling(amax_history_len=8)):
        try:
            model(x)
        except ValueError as error:
            raised = error
except RuntimeError as error:  # leaving the region: te-history-switch-crash
    print("leaving the region with amax_history_len=8 raises", type(error).__name__)
if raised is None:
    print("amax_history_len=8: the forward runs")
else:
    print(f"amax_history_len=8: the forward must run too, got {type(raised).__name__}: {raised}")
sys.exit(1 if "Number of weight tensors" in str(raised) else 0)
