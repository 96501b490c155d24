"""The state of torchao's low-bit optimizers cannot be copied: copy.deepcopy(optimizer.state_dict()) raises.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import copy
import io
import torch
import torchao.optim

torch.set_num_threads(1)
torch.compiler.set_stance("force_eager")  # each step is compiled otherwise, for ten seconds
bad = 0
for kind in (torch.optim.AdamW, torchao.optim.AdamW8bit, torchao.optim.AdamW4bit, torchao.optim.AdamWFp8):
    p = torch.nn.Parameter(torch.zeros(64, 128))
    optimizer = kind([p])
    p.grad = torch.ones(64, 128)
    optimizer.step()
    torch.save(optimizer.state_dict(), file := io.BytesIO())
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=False))
    print(f"{kind.__name__}: is saved and loaded")
    try:
        copy.deepcopy(optimizer.state_dict())
        print(f"{kind.__name__}: is copied")
    except NotImplementedError as error:
        print(f"{kind.__name__}: {str(error)[:120]}")
        bad += 1
sys.exit(bool(bad))
