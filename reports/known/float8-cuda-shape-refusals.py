"""float8 on CUDA: dimensions off 16 are refused late, or without the layer's name."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

torch.set_num_threads(1)
if not torch.cuda.is_available():
    print("cannot tell: the refusals are CUDA's, and there is no device")
    sys.exit(125)


def attempt(tokens, k, n):
    model = nn.Sequential(nn.Linear(k, n, bias=False)).to("cuda", torch.bfloat16)
    config = Float8LinearConfig.from_recipe_name("tensorwise")
    model = convert_to_float8_training(model, config=config)
    phase = "FORWARD"
    try:
        y = model(torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16, requires_grad=True))
        phase = "BACKWARD"
        y.backward(torch.ones_like(y))
        torch.cuda.synchronize()
    except RuntimeError as error:
        return phase, str(error).splitlines()[0]
    return "", ""


usual = attempt(32, 64, 32)
print("32 tokens, 64 in, 32 out:", usual)
if usual[0]:
    print("cannot tell: what is allowed does not run")
    sys.exit(125)
late, said = attempt(17, 64, 32)
print("17 tokens:", late, said)
named, told = attempt(32, 24, 32)
print("24 in:", named, told)
# late: only backward refuses tokens; wordless: what refuses in_features does not say whose they are
sys.exit(int(late == "BACKWARD" or (bool(named) and "'0'" not in told and "layer" not in told.lower())))
