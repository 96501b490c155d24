"""quantize_(MXFP8TrainingOpConfig): the bias of a converted Linear is ignored and gets no gradient.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import tempfile
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference


def mq(lin, mode):
    seq = nn.Sequential(lin)
    quantize_(seq, MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED, scale_calculation_mode=mode))
    return seq[0]


torch.set_num_threads(1)
torch.manual_seed(0)
bad = 0
for mode in (Mode.FLOOR, Mode.RCEIL):
    for dt in (torch.float32, torch.bfloat16):
        lin = nn.Linear(64, 32, bias=True, dtype=dt)
        with torch.no_grad():
            lin.bias.fill_(100.0)
        m = mq(lin, mode)
        y = m(torch.randn(32, 64).to(dt))
        y.backward(torch.ones_like(y))  # 0.17 takes no gradient that is not contiguous
        db = m.bias.grad
        print(f"{mode} {dt}: mean output {y.mean().item():.3f} (rule: about 100), bias.grad "
              f"{None if db is None else db[0].item()} (rule: 32.0), bias type {type(m.bias.data).__name__}")
        bad += abs(y.mean().item() - 100) > 5 or db is None

torch.serialization.add_safe_globals([MXFP8TrainingOpConfig, Mode, KernelPreference, type(m.weight.data)])  # another entry's


def state(trained):
    model = nn.Sequential(mq(nn.Linear(64, 32), Mode.FLOOR))
    optimizer = torch.optim.AdamW(model.parameters())
    if trained:
        model(torch.randn(32, 64)).pow(2).sum().backward()
        optimizer.step()
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))


with tempfile.TemporaryDirectory() as folder:
    dcp.save(state(trained=True), checkpoint_id=folder, no_dist=True)
    try:
        dcp.load(state(trained=False), checkpoint_id=folder, no_dist=True)
    except dcp.api.CheckpointException as error:
        said = " ".join(str(error).split())
        print("torch.distributed.checkpoint:", said[said.rfind("Missing key") :][:80])
        bad += "Missing key" in said
sys.exit(bool(bad))
