import torch


def both(x):
    return x.sum(0), x.sum(0, keepdim=True)


for dtype in (torch.float32, torch.bfloat16, torch.float16):
    torch._dynamo.reset()
    try:
        torch.compile(both)(torch.randn(64, 64, dtype=dtype))
        print(f"{dtype}: ok")
    except Exception as error:
        print(f"{dtype}: {type(error).__name__}: {str(error).splitlines()[0]}")
