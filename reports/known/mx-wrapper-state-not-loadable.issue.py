import io
import pickle

import torch
from torchao.prototype.moe_training.config import Float8TrainingOpConfig, MXFP8TrainingOpConfig
from torchao.quantization import quantize_

for config in (MXFP8TrainingOpConfig(), Float8TrainingOpConfig()):
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16))
    quantize_(model, config)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    try:
        torch.load(file)
        print(type(config).__name__, "loads")
    except pickle.UnpicklingError as error:
        refused = next(line for line in str(error).splitlines() if "Unsupported" in line)
        print(type(config).__name__, refused.strip().split(" was")[0])
