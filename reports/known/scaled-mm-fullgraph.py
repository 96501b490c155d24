"""torch.nn.functional.scaled_mm does not compile with fullgraph=True.
"""
import logging, os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
logging.disable(logging.CRITICAL)
device = "cuda" if torch.cuda.is_available() else "cpu"
codes = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn)
scale = torch.ones((), device=device)


def product(codes, scale):
    kind = F.ScalingType.TensorWise
    return F.scaled_mm(codes, codes.t(), scale, kind, scale, kind, output_dtype=torch.bfloat16)


print("eager is right:", bool((product(codes, scale) == 16).all()))
try:
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)(codes, scale)
    print("compiled is right:", bool((compiled == 16).all()))
except torch._dynamo.exc.Unsupported as error:
    found = "_scaled_mm_v2" in str(error)
    print("compiled raises", type(error).__name__, "and names _scaled_mm_v2:", found)
    sys.exit(found)
