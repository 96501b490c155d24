"""torch.nn.functional.scaled_mm with a contracted dimension of 0 returns 0 instead of the bias."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, str(error).splitlines()[0], flush=True), os._exit(125))
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
one, kind = torch.ones(()), F.ScalingType.TensorWise
a = torch.zeros(2, 0).to(torch.float8_e4m3fn)
b = torch.zeros(3, 0).to(torch.float8_e4m3fn)
bias = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
want = F.linear(a.bfloat16(), b.bfloat16(), bias)
got = F.scaled_mm(a, b.t(), one, kind, one, kind, bias=bias, output_dtype=torch.bfloat16)
rows, kind = (torch.ones(2, 1), torch.ones(1, 3)), F.ScalingType.RowWise
row = F.scaled_mm(a, b.t(), rows[0], kind, rows[1], kind, bias=bias, output_dtype=torch.bfloat16)
print("F.linear         ", want[0].tolist())
print("torch.addmm      ", torch.addmm(bias, a.bfloat16(), b.bfloat16().t())[0].tolist())
print("F.scaled_mm      ", got[0].tolist(), " rowwise:", row[0].tolist())
sys.exit(0 if torch.equal(got, want) and torch.equal(row, want) else 1)
