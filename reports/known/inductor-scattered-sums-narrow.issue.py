import torch

torch.set_num_threads(1)
rows = 5000
index = torch.zeros(rows, dtype=torch.long)


def index_add(x):
    return torch.zeros(1, 16, dtype=x.dtype).index_add(0, index, x)


def scatter_add(x):
    return torch.zeros(1, 16, dtype=x.dtype).scatter_add(0, index[:, None].expand_as(x), x)


for f in (index_add, scatter_add):
    for dtype in (torch.bfloat16, torch.float16):
        ones = torch.ones(rows, 16, dtype=dtype)
        eager, compiled = f(ones)[0, 0].item(), torch.compile(f)(ones)[0, 0].item()
        print(f"{f.__name__} of {rows} ones in {dtype}: eager {eager:g}, compiled {compiled:g}")
