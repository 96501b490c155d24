"""torch, fused SGD, Adam, AdamW and Adagrad on a CPU: where a parameter and its gradient lie in memory otherwise than
each other, elements of one are paired with others of the other."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch

torch.set_num_threads(1)
KINDS = ("SGD", "Adam", "AdamW", "Adagrad")


def train(kind, fused, apart):
    """Half of a weight after a step along the gradient of sum(half * [[1, 2, 3], [4, 5, 6]]), and the other half,
    which no optimizer has. ``apart``: the half is a tensor of its own."""
    weight = torch.zeros(2, 6)
    half, other = weight.chunk(2, dim=1)
    parameter = torch.nn.Parameter(half.clone() if apart else half)
    optimizer = getattr(torch.optim, kind)([parameter], lr=1.0, fused=fused)
    (parameter * torch.arange(1.0, 7.0).reshape(2, 3)).sum().backward()
    optimizer.step()
    return parameter.tolist(), other.tolist()


wrong = []
for kind in KINDS:
    want, got = train(kind, False, False), train(kind, True, False)
    print(f"{kind}, not fused: the half {want[0]}, the other {want[1]}")
    print(f"{kind}, fused:     the half {got[0]}, the other {got[1]}")
    if not torch.allclose(torch.tensor(train(kind, True, True)[0]), torch.tensor(want[0])):
        print("cannot tell: fused steps of a tensor of its own are wrong, too")
        sys.exit(125)
    if not torch.allclose(torch.tensor(got), torch.tensor(want)):
        wrong.append(kind)
print("wrong where it is fused:", ", ".join(wrong) or "none")
sys.exit(bool(wrong))
