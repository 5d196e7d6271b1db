"""A DeepSpeed loop of four lines; ZeRO 3, accumulation, precision and offload stand in ds_config.json."""

from collections import namedtuple

import torch
from deepspeed import initialize
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Output = namedtuple("Output", "loss")  # a pytree: FSDP2 finds no tensors in objects of plain classes


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(23, 16)
        self.hidden = nn.Linear(16, 16)
        self.head = nn.Linear(16, 23)

    def forward(self, tokens):
        output = self.head(torch.relu(self.hidden(self.embed(tokens))))
        return Output(loss=nn.functional.cross_entropy(output.float().flatten(0, 1), tokens.roll(-1, 1).flatten()))


numbers = torch.Generator().manual_seed(3)
tokens = torch.randint(0, 23, (96, 6), generator=numbers)
dataloader = DataLoader(TensorDataset(tokens), batch_size=1)
my_model = Model()
model, optimizer, _, _ = initialize(model=my_model, config="ds_config.json")
for (batch,) in dataloader:
    loss = model(batch.to(model.device)).loss
    model.backward(loss)
    model.step()
