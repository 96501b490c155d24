"""torch._scaled_mm on a CPU multiplies each product by one scale before the other: NaN where that overflows, and the result does not.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
torch.manual_seed(0)
a, b = ((torch.randn(32, 16) * 100).to(torch.float8_e4m3fn) for _ in range(2))
large, small = torch.tensor(3.5e35), torch.tensor(1.4e-3)
whole = F.ScalingType.TensorWise
bad = 0
for words, s, t in (("scale_a large, scale_b small", large, small), ("the same two, exchanged", small, large)):
    right = (a.double() @ b.double().t()) * s.double() * t.double()
    old = torch._scaled_mm(a, b.t(), s, t, out_dtype=torch.bfloat16)
    new = F.scaled_mm(a, b.t(), s, whole, t, whole, output_dtype=torch.bfloat16)
    compiled = torch.compile(F.scaled_mm)(a, b.t(), s, whole, t, whole, output_dtype=torch.bfloat16)
    counts = [int((~y.isfinite()).sum()) for y in (old, new, compiled)]
    print(f"{words}: largest result {right.abs().max():.1e}; not finite of 1024: _scaled_mm {counts[0]}, F.scaled_mm {counts[1]}, compiled {counts[2]}")
    bad += sum(counts)
if not bad and not torch.cpu.get_capabilities().get("amx_int8"):
    print("cannot tell: this CPU has no AMX, whose kernel it is")
    sys.exit(125)
sys.exit(bool(bad))
