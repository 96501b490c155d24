"""torch.nn.functional.scaled_mm with a contracted dimension of 0 returns 0 instead of the bias."""
import sys
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
one, kind = torch.ones(()), F.ScalingType.TensorWise
a = torch.zeros(2, 0).to(torch.float8_e4m3fn)
b = torch.zeros(3, 0).to(torch.float8_e4m3fn)
bias = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
want = F.linear(a.bfloat16(), b.bfloat16(), bias)
old = torch._scaled_mm(a, b.t(), one, one, bias=bias, out_dtype=torch.bfloat16)
got = F.scaled_mm(a, b.t(), one, kind, one, kind, bias=bias, output_dtype=torch.bfloat16)
print("F.linear         ", want[0].tolist())
print("torch._scaled_mm ", old[0].tolist())
print("F.scaled_mm      ", got[0].tolist())
sys.exit(0 if torch.equal(got, want) else 1)
