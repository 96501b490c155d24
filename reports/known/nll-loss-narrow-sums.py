"""cross_entropy and nll_loss in bf16 or fp16 sum their losses in that dtype on a CPU.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
bad = 0
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    worst = least = 0.0
    for batch in range(8):
        rows = F.log_softmax(torch.randn(8192, 1000), dim=1).to(dtype)
        target = torch.randint(1000, (8192,))
        exact = -rows.double().gather(1, target[:, None]).mean()
        worst = max(worst, abs(F.nll_loss(rows, target).double() / exact - 1).item())
        least = max(least, abs(exact.to(dtype).double() / exact - 1).item())
    print(f"{dtype}: the mean is off by up to {worst:.3%}, rounded once by up to {least:.3%}")
    bad += dtype != torch.float32 and worst > 2 * least
sys.exit(bool(bad))
