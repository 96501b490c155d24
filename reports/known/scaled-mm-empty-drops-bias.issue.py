import torch
import torch.nn.functional as F

one, kind = torch.ones(()), F.ScalingType.TensorWise
a = torch.zeros(2, 0).to(torch.float8_e4m3fn)
b = torch.zeros(3, 0).to(torch.float8_e4m3fn)
bias = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
print("F.linear:   ", F.linear(a.bfloat16(), b.bfloat16(), bias)[0].tolist())
got = F.scaled_mm(a, b.t(), one, kind, one, kind, bias=bias, output_dtype=torch.bfloat16)
print("F.scaled_mm:", got[0].tolist())
