"""torch.optim.Muon without Nesterov's momentum divides the momentum of a bf16 parameter by its norm.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch

torch.set_num_threads(1)
bad = 0
for dtype in (torch.float32, torch.bfloat16):
    for nesterov in (True, False):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.zeros(8, 8, dtype=dtype))
        optimizer = torch.optim.Muon([parameter], lr=0.125, momentum=0.5, nesterov=nesterov)
        want = torch.zeros_like(parameter)
        for grad in torch.randn(2, 8, 8).to(dtype):
            parameter.grad = grad.clone()
            optimizer.step()
            want = want.lerp(grad, 0.5)
        got = optimizer.state[parameter]["momentum_buffer"]
        off = ((got - want).norm() / want.norm()).item()
        print(f"{dtype}, nesterov={nesterov}: after two steps the momentum is off by {off:.1%} of its norm")
        bad += off > 0.01
sys.exit(bool(bad))
