"""torch.compile on a CPU does not compile a padded comparison of indices, as create_block_mask makes it.
"""
import logging, os, sys, warnings
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch.nn.attention.flex_attention import create_block_mask

torch.set_num_threads(1)
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
causal = lambda batch, head, row, column: row >= column
bad = 0
for rows, columns in ((128, 256), (16, 256), (100, 100)):
    mask = lambda: create_block_mask(causal, None, None, rows, columns, "cpu").to_dense()
    torch._dynamo.reset()
    try:
        print(f"{rows} x {columns}: compiles; equals eager: {torch.equal(torch.compile(mask)(), mask())}")
    except Exception as error:
        found = "C++ compile error" in str(error) and "different types" in str(error)
        print(f"{rows} x {columns}: {type(error).__name__}; types of a masked read differ: {found}")
        bad += found
        if not found:
            raise
sys.exit(bool(bad))
