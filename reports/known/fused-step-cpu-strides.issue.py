import torch

for kind in ("SGD", "Adam", "AdamW", "Adagrad"):
    for fused in (False, True):
        weight = torch.zeros(2, 4)
        half, other = weight.chunk(2, dim=1)
        parameter = torch.nn.Parameter(half)  # nobody optimizes the other half
        optimizer = getattr(torch.optim, kind)([parameter], lr=1.0, fused=fused)
        parameter.sum().backward()
        optimizer.step()
        print(f"{kind}, {fused=}: {weight.round().tolist()}")
