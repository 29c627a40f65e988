"""What `11_many_processes.ipynb` starts: `torchrun --nproc-per-node=2 many_processes.py FOLDER [fault]`."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import invfunc

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, processes = dist.get_rank(), dist.get_world_size()
folder, fault = Path(sys.argv[1]), sys.argv[2:]

images, labels = torch.load(folder / "digits.pt")
data = TensorDataset(images.double().flatten(1) / 16, labels)
model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
f, params = invfunc.functional(model)


def losses(params, x, y):
    if fault and rank == 1 and len(x) < 64:  # the last batch
        raise ValueError("a label that is none")
    return F.cross_entropy(f(params, x), y, reduction="none")


def drawn(make):
    return make(f, F.cross_entropy, generator=torch.Generator().manual_seed(0))


# every process has a part of the samples, which need not be as long as the others
part = Subset(data, range(rank * len(data) // processes, (rank + 1) * len(data) // processes))
loader = DataLoader(part, batch_size=64)
repeating = DataLoader(data, batch_size=64, sampler=DistributedSampler(data, shuffle=False))

statistics = {
    "variance": invfunc.variance(losses),
    "diag_ggn": invfunc.diag_ggn(f, F.cross_entropy),
    "kfac": drawn(invfunc.kfac),
    "ekfac": drawn(invfunc.ekfac),
}
results, seconds, sent = {}, {}, {}
send = dist.send


def counting(x, *args, **options):
    sent[key] = sent.get(key, 0) + x.nbytes
    return send(x, *args, **options)


dist.send = counting
for key, t in statistics.items():
    began = time.perf_counter()
    results[key] = invfunc.distributed(invfunc.streamed(t))(params, loader)
    seconds[key] = time.perf_counter() - began
key = "repeated samples"
results[key] = invfunc.distributed(invfunc.streamed(statistics["diag_ggn"]))(params, repeating)
own = invfunc.distributed(invfunc.streamed(invfunc.batch_l2_grad(losses)))(params, loader)
results["rows"] = torch.tensor([len(x) for x in own.values()])
if rank == 0:
    torch.save((results, seconds, sent), folder / f"{processes}.pt")
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # at the end of a process, gloo of torch 2.13 aborts now and then
