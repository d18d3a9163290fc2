"""One rank of a small training: FOLDER WORLD RANK KIND FACTOR; the fourth batch is multiplied by the factor."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tenterhook import watch

folder, world, rank, kind, factor = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5])
torch.set_num_threads(1)
os.environ.update(WORLD_SIZE=str(world), RANK=str(rank))
torch.manual_seed(0)
model = net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
if world > 1:
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=world)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(net)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
while rank and not (Path(folder) / "run.json").exists():  # the first rank makes the folder
    time.sleep(0.02)
with watch(model, to=folder, every=1):
    for step in range(6):
        x = torch.randn(8, 4, generator=generator) * (factor if step == 3 else 1.0)
        loss = model(x[rank::world]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if world > 1:
    dist.destroy_process_group()
