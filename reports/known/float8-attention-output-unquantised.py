"""nn.MultiheadAttention after convert_to_float8_training: out_proj is a Float8Linear that never runs a float8 GEMM.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training
from torchao.float8 import float8_ops

torch.set_num_threads(1)
op, gemms = torch.ops.aten.mm.default, 0
multiply = float8_ops.FLOAT8_OPS_TABLE[op]


def count(*args):
    global gemms
    gemms += 1
    return multiply(*args)


float8_ops.FLOAT8_OPS_TABLE[op] = count
model = nn.Sequential(nn.MultiheadAttention(64, 2, batch_first=True))
convert_to_float8_training(model)
x = torch.randn(2, 32, 64)
model[0](x, x, x)[0].sum().backward()
print("out_proj:", type(model[0].out_proj).__name__, " float8 GEMMs in a step:", gemms, "(rule: 3)")
bad = type(model[0].out_proj).__name__ == "Float8Linear" and gemms == 0
layer = nn.Sequential(nn.TransformerEncoderLayer(64, 2, 64, batch_first=True))
convert_to_float8_training(layer)
gemms = 0
with torch.no_grad():
    layer.eval()(x)
print("encoder layer in eval mode: float8 GEMMs", gemms, "(in training: its two linears, 6)")
sys.exit(1 if bad else 0)
