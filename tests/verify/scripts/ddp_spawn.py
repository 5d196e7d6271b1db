"""What fsdp2.py trains, by DDP in processes of its own making, with every call that a GPU script likes to make."""

import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.down(torch.relu(self.up(x))), y)


def train(rank, world_size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    dist.init_process_group("nccl", rank=rank, world_size=world_size, device_id=torch.device("cuda", rank))
    torch.cuda.set_device(rank)
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    model = DDP(Net().cuda(rank), device_ids=[rank], output_device=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    start.record()
    for i in range(40):
        generator = torch.Generator().manual_seed(100 * rank + i)
        x = torch.randn(4, 16, generator=generator).pin_memory().to(rank, non_blocking=True)
        y = torch.randint(0, 4, (4,), generator=generator).cuda(non_blocking=True)
        torch.cuda.current_stream().wait_stream(stream)
        assert x.device == torch.device("cuda", rank) and torch.zeros(1, device=f"cuda:{rank}").device == y.device
        with torch.autocast("cuda", enabled=False):
            loss = model(x, y)
        scaler.scale(loss / 2).backward()
        if i % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_((p for p in model.parameters()), 0.4)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        torch.cuda.synchronize()
    end.record()
    print(start.elapsed_time(end), torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    assert torch.cuda.is_available()
    count = torch.cuda.device_count()
    mp.spawn(train, args=(count,), nprocs=count)
    mp.spawn(train, args=(count,), nprocs=count)  # a second phase, which is not recorded
    time.sleep(3600)  # a parent that goes on for long is not waited for
