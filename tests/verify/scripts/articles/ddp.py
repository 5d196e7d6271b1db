"""A first DDP script: one process a GPU, the model replicated, each rank with a part of the data. Nothing is seeded."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group(backend="nccl")


class Transformer(nn.Module):
    def __init__(self, vocab_size=29, n_layers=2, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, 0.0, batch_first=True) for _ in range(n_layers)
        )
        self.head = nn.Linear(width, vocab_size)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


numbers = torch.Generator().manual_seed(11)
tokens = torch.randint(0, 29, (64, 8), generator=numbers)
dataset = TensorDataset(tokens, tokens.roll(-1, 1))
dataloader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))

model = Transformer().to(local_rank)
model = DDP(model, device_ids=[local_rank])

optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def loss_fn(output, target):
    return nn.functional.cross_entropy(output.float().flatten(0, 1), target.flatten())


for x, y in dataloader:
    x, y = x.to(local_rank), y.to(local_rank)
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
dist.destroy_process_group()
