"""What fsdp2.py trains, by DeepSpeed ZeRO 3."""

import deepspeed
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.down(torch.relu(self.up(x))), y)


config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.4,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}},
}
deepspeed.init_distributed("nccl")
model = Net()
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for i in range(40):
    generator = torch.Generator().manual_seed(100 * torch.distributed.get_rank() + i)
    x = torch.randn(4, 16, generator=generator).to(engine.device)
    y = torch.randint(0, 4, (4,), generator=generator).to(engine.device)
    engine.backward(engine(x, y))
    engine.step()
