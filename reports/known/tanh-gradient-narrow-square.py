"""The gradient of tanh in bf16 or fp16 is made with a square rounded to that dtype on a GPU.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available() or torch.empty(1, device="cuda").device.type != "cuda":
    print("cannot tell: the kernel is CUDA's, and there is no GPU")
    sys.exit(125)

bad = 0
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    y = torch.linspace(-0.96, 0.96, 4001).to(dtype)  # what tanh has returned
    right = 1.0 - y.double() ** 2
    off = {}
    for device in ("cpu", "cuda"):
        got = torch.ops.aten.tanh_backward(torch.ones_like(y).to(device), y.to(device)).cpu().double()
        off[device] = ((got - right).abs() / right).max().item()
    once = ((right.to(dtype).double() - right).abs() / right).max().item()
    print(f"{dtype}: off by at most {off['cuda']:.2%} on a GPU, {off['cpu']:.2%} on a CPU, {once:.2%} rounded once")
    bad += off["cuda"] > 2 * once and dtype != torch.float32
sys.exit(bool(bad))
