import torch

torch.use_deterministic_algorithms(True)  # uninitialised memory is filled with NaN

for fused in (False, True):
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    for gradient in (torch.inf, 1.0):  # the first one overflows: its step is skipped
        parameter.grad = torch.full((3,), gradient)
        scaler.step(optimizer)
        scaler.update()
        buffer = optimizer.state.get(parameter, {}).get("momentum_buffer")
        print(f"{fused=}, gradient {gradient}: {parameter.tolist()}, {buffer=}")
