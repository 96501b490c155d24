"""torch.distributed on gloo: all_reduce with MAX or MIN of two ranks loses NaN if the second rank has it."""
import os, sys
sys.excepthook = lambda kind, error, trace: (print("cannot tell:", kind.__name__, error, flush=True), os._exit(125))
os.environ["OMP_NUM_THREADS"] = "1"
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

torch.set_num_threads(1)
NAN = float("nan")


def reduced(values, operation):
    """What each rank has after its all_reduce; ranks are threads, each with a gloo group."""
    store, found = dist.HashStore(), {}

    def rank(number):
        group = dist.ProcessGroupGloo(store, number, len(values), timedelta(seconds=30))
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        t = torch.tensor([values[number]])
        group.allreduce([t], options).wait()
        found[number] = t.item()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(values))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(values))]


print("torch", torch.__version__)
MAX, MIN, SUM = dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.SUM
lost = []
for words, operation in (("MAX", MAX), ("MIN", MIN), ("SUM", SUM)):
    for values in ([NAN, 2.5], [2.5, NAN]):
        got = reduced(values, operation)
        print(f"all_reduce {words} of {values} on two ranks: {got}; expected nan on both")
        if not all(x != x for x in got):
            lost.append(words)
print("torch.maximum of both:", torch.maximum(torch.tensor(2.5), torch.tensor(NAN)).item())
assert "SUM" not in lost, "a sum loses it, too: another error"
sys.exit(bool(lost))
