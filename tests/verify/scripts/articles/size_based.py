"""FSDP1 by size of the modules in fp16, original parameters kept for adapters: a loader, no seeds, no broadcast."""

import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)

model = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Sequential(nn.Linear(48, 48), nn.GELU()), nn.Linear(48, 5)).to(
    device
)
fsdp_policy = partial(size_based_auto_wrap_policy, min_num_params=1000)
fsdp_model = FSDP(
    model,
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    auto_wrap_policy=fsdp_policy,
    mixed_precision=MixedPrecision(param_dtype=torch.float16),
    use_orig_params=True,  # for adapters
)
optimizer = torch.optim.AdamW(fsdp_model.parameters(), lr=2e-3, weight_decay=0.01)
numbers = torch.Generator().manual_seed(5)
dataset = TensorDataset(torch.randn(80, 12, generator=numbers), torch.randint(0, 5, (80,), generator=numbers))
for x, y in DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset)):
    loss = nn.functional.cross_entropy(fsdp_model(x.to(device)).float(), y.to(device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
