"""Two steps of a checkpointed Linear in FP8, in a process of its own: prints its scales."""

from __future__ import annotations

from te_on_cpu.environment import enter

enter()

import torch  # noqa: E402
import transformer_engine.pytorch as te  # noqa: E402
from transformer_engine.common.recipe import DelayedScaling  # noqa: E402

layer = te.Linear(32, 32, bias=False, params_dtype=torch.bfloat16, device="cuda")
torch.nn.init.constant_(layer.weight, 0.5)
recipe = DelayedScaling(amax_history_len=4)
for _ in range(2):
    x = torch.full((16, 32), 4.0, dtype=torch.bfloat16, requires_grad=True)
    # 1.x has one name for the region, 2.x another
    region = (
        te.autocast(enabled=True, recipe=recipe)
        if hasattr(te, "autocast")
        else te.fp8_autocast(enabled=True, fp8_recipe=recipe)
    )
    with region:
        y = te.checkpoint(layer, x)
    y.backward(torch.full_like(y, 2.0))
meta = layer.fp8_meta
print(*meta["scaling_fwd"].scale[:2].tolist(), meta["scaling_bwd"].scale[0].item())
