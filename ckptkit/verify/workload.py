"""What is trained: model, batches, optimizer and schedule, the same for every strategy and world size."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import UsageError

WARMUP = 6  # steps
Groups = Callable[[nn.Module], "list[dict[str, Any]]"]


@dataclass(frozen=True, slots=True)
class Workload:
    """Names of functions, "pkg.mod:function", so that it travels to other processes.

    `model` takes nothing and answers a module that, called with a batch, returns the mean loss over its rows (a scalar,
    or an object with `.loss`). `batch` takes a step and answers the global batch of that step: a tuple or a dict of
    tensors with the rows of the batch in dimension 0. `groups` takes the model and answers the optimizer's groups.
    """

    model: str = "ckptkit.verify.default_model:default_model"
    batch: str = "ckptkit.verify.default_model:default_batch"
    groups: str = "ckptkit.verify.workload:groups_by_dimension"


def build_model(workload: Workload, seed: int) -> nn.Module:
    """The model from the same weights for the same seed; it trains."""
    torch.manual_seed(seed)
    model = _named(workload.model)()
    if not isinstance(model, nn.Module):
        raise UsageError(f"{workload.model} answered a {type(model).__name__}, not a torch.nn.Module")
    return model.train()


def rows_of(batch: Any) -> int:
    """The number of rows of a global batch. Raises UsageError where its tensors do not agree."""
    sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1:
        raise UsageError(
            f"the batch has tensors of {sorted(sizes)} rows", why="dimension 0 of every tensor is the global batch"
        )
    return int(sizes.pop())


def rows_in(workload: Workload) -> int:
    """The number of rows of the workload's global batch."""
    return rows_of(_named(workload.batch)(0))


def local_batch(workload: Workload, step: int, *, part: int, parts: int, device: str) -> Any:
    """Part number `part` of `parts` equal parts of the global batch of `step`.

    Equal parts make the mean of the parts' mean losses the mean over the global batch, whatever the world size.
    Raises UsageError if the rows cannot be split evenly.
    """
    batch = _named(workload.batch)(step)
    rows = rows_of(batch)
    if rows % parts:
        raise UsageError(
            f"a global batch of {rows} rows cannot be split into {parts} equal parts",
            why="every rank and micro-batch must weigh the same for losses to be comparable across world sizes",
            hint="choose --world-size and --accumulate so that their product divides the batch",
        )
    size = rows // parts
    return tree_map_only(Tensor, lambda t: t[part * size : (part + 1) * size].to(device) if t.dim() else t, batch)


def fingerprint(batch: Any) -> int:
    """A number in [-2**63, 2**63): the sum of the hashes of the rows, so that the parts of a batch, however it is cut,
    add up (modulo 2**64) to the same."""
    tensors = [leaf.cpu().contiguous() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    total = 0
    for row in zip(*tensors, strict=True):
        data = b"".join(bytes(t.reshape(-1).view(torch.uint8).tolist()) for t in row)
        total += int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    return (total + 2**63) % 2**64 - 2**63


def loss_of(model: Callable[..., Any], batch: Any) -> Tensor:
    """Calls the model with the batch (a dict as keywords) and takes the loss from what it answers."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, Sequence):
        output = model(*batch)
    else:
        output = model(batch)
    loss = getattr(output, "loss", output[0] if isinstance(output, tuple) else output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(f"the model answered {type(output).__name__}, not a scalar loss or an object with .loss")
    return loss


def build_groups(workload: Workload, model: nn.Module) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = _named(workload.groups)(model)
    return groups


def groups_by_dimension(model: nn.Module) -> list[dict[str, Any]]:
    """The usual two groups: matrices decay; vectors (biases, norms) do not, and learn half as fast."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return _groups([p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1])


def groups_by_unit(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups that never cut through a unit of sharding, as FSDP1 with use_orig_params=False wants them."""
    inside = {id(p) for unit in units(model) for p in unit.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    return _groups([p for p in trained if id(p) in inside], [p for p in trained if id(p) not in inside])


def _groups(decayed: list[nn.Parameter], free: list[nn.Parameter]) -> list[dict[str, Any]]:
    groups = [
        {"params": decayed, "weight_decay": 0.1, "lr_scale": 1.0},
        {"params": free, "weight_decay": 0.0, "lr_scale": 0.5},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(name: str, groups: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
    """AdamW ("adamw") or SGD with momentum ("sgd"). A group's "lr_scale" multiplies the learning rate."""
    base = {"adamw": 1e-2, "sgd": 1e-1}.get(name)
    if base is None:
        raise UsageError(f"unknown optimizer {name!r}", hint="adamw or sgd")
    plain = [{k: v for k, v in group.items() if k != "lr_scale"} for group in groups]
    for group, given in zip(plain, groups, strict=True):
        group.setdefault("lr", base * given.get("lr_scale", 1.0))
    if name == "adamw":
        return torch.optim.AdamW(plain, lr=base, betas=(0.9, 0.95))
    return torch.optim.SGD(plain, lr=base, momentum=0.9)


def warmup(step: int) -> float:
    """Linear warm-up over WARMUP steps, then a slow decay: no two neighbouring steps have the same factor."""
    return (step + 1) / WARMUP if step < WARMUP else (WARMUP / (step + 1)) ** 0.5


def build_scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, warmup)


def units(model: nn.Module) -> list[nn.Module]:
    """The submodules that are sharded on their own, innermost first: layers of a ModuleList, and frozen parts.

    A module that shares a parameter with the rest of the model stays with the rest, so that ties hold.
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
            listed = isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList)
            frozen = _is_frozen(child) and not _is_frozen(module)
            if (listed or frozen) and not _shares_outside(child, model):
                found.append(child)

    visit(model)
    return found


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def _shares_outside(module: nn.Module, model: nn.Module) -> bool:
    inside = {id(m) for m in module.modules()}
    mine = {id(p) for p in module.parameters()}
    outside = [m for m in model.modules() if id(m) not in inside]
    return any(id(p) in mine for m in outside for p in m.parameters(recurse=False))


def _named(reference: str) -> Callable[..., Any]:
    module, _, name = reference.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"cannot find {reference!r}", why=str(error), hint="pkg.mod:function, importable from here"
        ) from error
    return found
