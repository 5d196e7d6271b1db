"""A first FSDP1 script, in its plainest stage; stages.py makes the later ones of it. Nothing is seeded or broadcast."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader, Dataset


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("nccl", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


class SimpleTransformer(nn.Module):
    def __init__(self, vocab_size=40, d_model=16, nhead=2, num_layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        layer = nn.TransformerEncoderLayer(d_model, nhead, dim_feedforward=32, batch_first=True)
        self.transformer_encoder = nn.TransformerEncoder(layer, num_layers=num_layers)
        self.output_layer = nn.Linear(d_model, vocab_size)

    def forward(self, x):
        return self.output_layer(self.transformer_encoder(self.embedding(x)))


class RandomDataset(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.randint(0, 40, (10,))


def train(rank, world_size):
    setup(rank, world_size)
    torch.cuda.set_device(rank)
    device = torch.device(f"cuda:{rank}")
    model = SimpleTransformer().to(device)
    fsdp_model = FSDP(model)
    optimizer = optim.AdamW(fsdp_model.parameters(), lr=0.001)
    loader = DataLoader(RandomDataset(), batch_size=4)
    loss_fn = nn.CrossEntropyLoss()
    fsdp_model.train()
    for batch_idx, data in enumerate(loader):
        data = data.to(device)
        targets = torch.roll(data, -1, 1)
        optimizer.zero_grad()
        output = fsdp_model(data)
        loss = loss_fn(output.view(-1, output.shape[-1]), targets.view(-1))
        loss.backward()
        optimizer.step()
        if batch_idx % 10 == 0:
            print(f"Rank {rank}, batch {batch_idx}, loss {loss.item()}")
    cleanup()


if __name__ == "__main__":
    world_size = torch.cuda.device_count()
    rank = int(os.environ.get("RANK", "0"))
    train(rank, world_size)
