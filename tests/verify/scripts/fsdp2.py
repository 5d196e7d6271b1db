"""A torchrun script that asks for NCCL and CUDA; a test plants faults in it by naming one in FAULT."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

FAULT = ""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.down(torch.relu(self.up(x))), y)


dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
model = Net().to(device)
if FAULT != "no broadcast":
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
if FAULT == "optimizer first":
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
fully_shard(model.up)
fully_shard(model)
if FAULT != "optimizer first":
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01 if FAULT != "no decay" else 0.0)
for i in range(40):
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + (i if FAULT != "other data" else i + 2))
    x = torch.randn(4, 16, generator=generator).to(device)
    y = torch.randint(0, 4, (4,), generator=generator).to(device)
    loss = model(x, y)
    (loss if FAULT == "no division" else loss / 2).backward()
    if i % 2:
        if FAULT != "no clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        optimizer.step()
        optimizer.zero_grad()
        if FAULT == "crash" and i == 3:
            raise RuntimeError("the planted crash")
