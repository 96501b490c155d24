"""torch.nn.functional.grouped_mm of fp16 and fp32 runs, but does not compile.
"""
import logging, os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
logging.disable(logging.CRITICAL)
offs = torch.tensor([3, 8], dtype=torch.int32)
bad = 0
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    x, w = torch.randn(8, 16, dtype=dtype), torch.randn(2, 16, 32, dtype=dtype)
    right = torch.cat([x[:3] @ w[0], x[3:] @ w[1]])
    eager = torch.allclose(torch._grouped_mm(x, w, offs=offs), right)
    try:
        compiled = torch.compile(torch._grouped_mm, backend="aot_eager", fullgraph=True)
        same = torch.allclose(compiled(x, w, offs=offs), right)
        print(f"{dtype}: eager is right: {eager}, compiled is right: {same}")
    except Exception as error:
        found = "Expected inputs of BF16 type" in str(error)
        bad += eager and found
        print(f"{dtype}: eager is right: {eager}, compiled raises {type(error).__name__}: asks for BF16: {found}")
sys.exit(bool(bad))
