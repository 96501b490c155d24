"""Compiled, selectively checkpointed blocks multiply other FP8 codes in recompute than in forward."""
import contextlib, itertools, os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
import torch, torch.nn as nn, torch.nn.functional as F, torch.utils.checkpoint as again
from torch._inductor.output_code import CompiledFxGraph
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
class Block(nn.Module):  # the residuals, norms and linears of a Llama block, without attention
    def __init__(self, d=32):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.linears = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(5))
    def forward(self, x):
        v, o, gate, up, down = self.linears
        y = self.n2(x := x + o(v(self.n1(x))))
        return x + down(F.silu(gate(y)) * up(y))

class Product(torch.autograd.Function):  # what a layer of torchao does, in torch alone
    @staticmethod
    def forward(ctx, x, w):
        ctx.x, ctx.w, scales = x, w, [448 / t.abs().amax().float() for t in (x, w)]
        a, b = ((t * s).clamp(-448, 448).to(torch.float8_e4m3fn) for t, s in zip((x, w), scales))
        return torch._scaled_mm(a, b.t(), *(1 / s for s in scales), out_dtype=x.dtype)
    @staticmethod
    def backward(ctx, g):
        return g @ ctx.w, g.t() @ ctx.x
class Watch(TorchDispatchMode, contextlib.ContextDecorator):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten._scaled_mm:
            pair = [t.detach().float().clone() for t in (args[1].t(), args[0])]
            seen[torch._C._current_graph_task_id() != -1].append(pair)
        return func(*args, **(kwargs or {}))
def every_second_product():  # is kept, as torchtitan's selective checkpointing does
    def policy(ctx, op, *args, **kwargs):
        kept = op is torch.ops.aten._scaled_mm.default and next(turns[ctx.is_recompute])
        return again.CheckpointPolicy.MUST_SAVE if kept else again.CheckpointPolicy.PREFER_RECOMPUTE
    turns = [itertools.cycle((True, False)) for _ in range(2)]
    return again.create_selective_checkpoint_contexts(policy)
def convert(model, recipe):
    if recipe:
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    for linear in () if recipe else (m for m in model.modules() if isinstance(m, nn.Linear)):
        linear.forward = lambda x, w=linear.weight: Product.apply(x, w)

torch.set_num_threads(1), torch.manual_seed(0), (moved := {}), (call := CompiledFxGraph.__call__)
CompiledFxGraph.__call__ = lambda graph, inputs: Watch()(call)(graph, inputs)
for recipe, blocks in (("rowwise", 2), ("tensorwise", 2), ("rowwise_with_gw_hp", 1), ("", 1)):
    torch._dynamo.reset()
    seen, model = ([], []), nn.Sequential(*(Block() for _ in range(blocks))).bfloat16()
    convert(model, recipe)
    x, g = torch.randn(2, 32, 32, dtype=torch.bfloat16)
    try: model(x)
    except RuntimeError as error:  # torch 2.11 multiplies no rows on a CPU
        print(f"{recipe}: cannot run here: {error}")
        continue
    run = torch.compile(lambda x: again.checkpoint(model, x, use_reentrant=False, context_fn=every_second_product))
    run(x.requires_grad_(True)).backward(g)
    moved[recipe] = [int((a != b).sum()) for w, a in seen[1] for u, b in seen[0] if torch.equal(w, u)]
    print(f"{recipe or 'torch alone'}, blocks: {blocks}, codes moved in recomputed products: {moved[recipe]}")
sys.exit(1 if any(map(any, moved.values())) else 0 if all(moved.values()) else 125)
