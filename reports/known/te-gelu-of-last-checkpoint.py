"""te.checkpoint(use_reentrant=False) changes the GELU of every other LayerNormMLP of the process."""
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

torch.manual_seed(0)
other, model = te.Linear(64, 64), te.LayerNormMLP(64, 256)
x = torch.randn(64, 64, device="cuda")
before, fused = model(x), model.bias_gelu_nvfusion
if not fused:
    raise RuntimeError("NVTE_BIAS_GELU_NVFUSION is 0: there is nothing to turn off")
te.checkpoint(other, x.clone().requires_grad_(), use_reentrant=False)  # has nothing to do with it
after = model(x)
off = (after.double() - before.double()).norm().item() / before.double().norm().item()
print(f"model.bias_gelu_nvfusion: {fused} before, {model.bias_gelu_nvfusion} after another was checkpointed")
print(f"its output changed by {off:.3g} of its norm")
sys.exit(0 if model.bias_gelu_nvfusion else 1)
