"""torch, fused SGD with momentum under GradScaler: a first step that is skipped leaves a momentum buffer
of uninitialised memory, which the next step uses."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN


def train(fused, gradients):
    """The parameter, which begins at 0, and its momentum buffers after a step with each of these gradients."""
    parameter = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    for gradient in gradients:
        parameter.grad = torch.full((8,), gradient)
        scaler.step(optimizer)
        scaler.update()
    return parameter.tolist(), [state["momentum_buffer"] for state in optimizer.state.values()]


# the first gradient overflows, so the scale becomes 1, and its step is skipped
inf = float("inf")
want, got = (train(fused, [inf, 1.0])[0] for fused in (False, True))
print("after a step that is skipped and a step with a gradient of 1:")
print("  not fused:", want)
print("  fused:    ", got)
print("  buffers that the skipped step leaves, not fused:", train(False, [inf])[1])
print("  buffers that the skipped step leaves, fused:    ", train(True, [inf])[1])
if want != [-1.0] * 8 or train(True, [1.0])[0] != [-0.5] * 8:
    print("cannot tell: steps that are not skipped are wrong, too")
    sys.exit(125)
sys.exit(got != want)
