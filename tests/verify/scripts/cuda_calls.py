"""Asks for CUDA in every way that training scripts do, and trains one step."""

import copy
import io
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

local_rank = int(os.environ["LOCAL_RANK"])
cpu = torch.device("cpu")
assert torch.cuda.is_available() and torch.cuda.device_count() == 2 and torch.accelerator.is_available()
torch.cuda.set_device(local_rank)
assert torch.cuda.current_device() == local_rank and torch.cuda.is_bf16_supported()
for device in (torch.device("cuda"), torch.device("cuda:1"), torch.device("cuda", 0), torch.device(local_rank)):
    assert device == cpu and isinstance(device, torch.device)
assert torch.device("meta").type == "meta"
assert isinstance(copy.deepcopy(torch.device("cuda")), torch.device)
x = torch.ones(2, device="cuda")
made = [x.cuda(), x.cuda(local_rank), x.to("cuda"), x.to(local_rank), x.to("cuda", torch.bfloat16), x.pin_memory()]
made += [x.to(device="cuda", dtype=torch.float64), x.to(torch.bfloat16), x.new_zeros(2, device="cuda"), x.to(x)]
made += [torch.tensor([1.0], device=local_rank), torch.randn(2, device="cuda:0"), torch.empty_like(x, device="cuda")]
made += [torch.arange(3, device="cuda"), torch.zeros(2, pin_memory=True), torch.as_tensor([1], device="cuda")]
for moved in made:
    assert moved.device == cpu
assert x.to("cuda", torch.bfloat16).dtype == torch.bfloat16 and x.to(torch.float64).dtype == torch.float64
with torch.device("cuda"):
    assert torch.zeros(1).device == cpu
generator = torch.Generator(device="cuda").manual_seed(1)
assert isinstance(generator, torch.Generator) and torch.rand(1, generator=generator, device="cuda").device == cpu
buffer = io.BytesIO()
torch.save({"x": x, "device": torch.device("cuda")}, buffer)
for where in (None, "cuda", f"cuda:{local_rank}", torch.device("cuda"), {"cuda:0": "cuda:1"}, lambda s, _: s.cuda()):
    buffer.seek(0)
    assert torch.load(buffer, map_location=where, weights_only=False)["x"].device == cpu
with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
    torch.cuda.synchronize()
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == 0
assert torch.cuda.get_device_properties(0).total_memory > 0 and isinstance(torch.cuda.get_device_name(), str)
torch.cuda.manual_seed_all(3)
with torch.autocast("cuda", dtype=torch.bfloat16):
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
with torch.cuda.amp.autocast(dtype=torch.bfloat16):
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
assert torch.cuda.amp.GradScaler().is_enabled() and torch.amp.GradScaler("cuda").is_enabled()

dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", local_rank))
assert dist.is_nccl_available()
group = dist.new_group([0, 1], backend="nccl")
dist.barrier(device_ids=[local_rank])
value = torch.tensor([float(dist.get_rank())], device="cuda")
dist.all_reduce(value, op=dist.ReduceOp.AVG, group=group)
assert value.item() == 0.5
work = dist.all_reduce(value, dist.ReduceOp.AVG, async_op=True)
work.wait()
assert value.item() == 0.5
scattered = torch.zeros(1)
dist.reduce_scatter_tensor(scattered, torch.tensor([2.0, 4.0]), op=dist.ReduceOp.AVG)
assert scattered.item() == [2.0, 4.0][dist.get_rank()]
assert init_device_mesh("cuda", (2,)).device_type == DeviceMesh("cuda", [0, 1]).device_type == "cpu"


def net():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1)).cuda()


# What FSDP1 refuses on CPU, or does wrongly: sync_module_states, CPU offload of states.
torch.manual_seed(dist.get_rank())
plain = net()
everyone = [torch.empty_like(plain[0].weight) for _ in range(2)]
dist.all_gather(everyone, plain[0].weight.detach())
assert not torch.equal(everyone[0], everyone[1])
flat = FSDP(
    plain, None, ShardingStrategy.SHARD_GRAD_OP, sync_module_states=True, device_id=local_rank, use_orig_params=True
)
flat_optimizer = torch.optim.AdamW(flat.parameters(), lr=0.1)
flat(torch.ones(2, 4)).sum().backward(torch.tensor(1.0))
configs = FullStateDictConfig(offload_to_cpu=True), FullOptimStateDictConfig(offload_to_cpu=True)
with FSDP.state_dict_type(flat, StateDictType.FULL_STATE_DICT, *configs):
    state = flat.state_dict()
    assert torch.equal(state["0.weight"], everyone[0])
    FSDP.optim_state_dict(flat, flat_optimizer)

torch.manual_seed(0)
model = net()
compiled = torch.compile(model, mode="max-autotune")
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fully_shard(model, mp_policy=policy, offload_policy=CPUOffloadPolicy())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
model(torch.ones(2, 4, device="cuda")).sum().backward()
optimizer.step()
