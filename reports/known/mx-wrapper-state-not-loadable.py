"""quantize_(MXFP8TrainingOpConfig or Float8TrainingOpConfig): what the layer saves, torch.load refuses by default.
"""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import io
import pickle
import tempfile
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torchao.prototype.moe_training.config import Float8TrainingOpConfig, MXFP8TrainingOpConfig
from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

torch.set_num_threads(1)
bad = 0
mx = {"kernel_preference": KernelPreference.EMULATED}
configs = {
    "mxfp8, floor": MXFP8TrainingOpConfig(scale_calculation_mode=Mode.FLOOR, **mx),
    "mxfp8, rceil": MXFP8TrainingOpConfig(scale_calculation_mode=Mode.RCEIL, **mx),
    "float8": Float8TrainingOpConfig(),
}
for mode, config in configs.items():
    model = nn.Sequential(nn.Linear(64, 32))
    quantize_(model, config)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for weights_only in (True, False):
        file.seek(0)
        try:
            model.load_state_dict(torch.load(file, weights_only=weights_only))
            print(f"{mode}, weights_only={weights_only}: loads")
        except pickle.UnpicklingError as error:
            named = [line for line in str(error).splitlines() if "Unsupported" in line]
            print(f"{mode}, weights_only={weights_only}: {(named or ['refused'])[0].strip()[:160]}")
            bad += 1
with tempfile.TemporaryDirectory() as folder:
    dcp.save(model.state_dict(), checkpoint_id=folder, no_dist=True)
    try:
        dcp.load(model.state_dict(), checkpoint_id=folder, no_dist=True)
        print("torch.distributed.checkpoint: loads")
    except dcp.api.CheckpointException as error:
        named = type(error.failures[0][0]).__name__
        print("torch.distributed.checkpoint:", named)
        bad += named == "UnpicklingError"
sys.exit(bool(bad))
