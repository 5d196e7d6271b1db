"""Strategies with one planted fault each, for tests that must see it; named "tests.verify.broken_strategies:NAME"."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from ckptkit.errors import MissingPackageError
from ckptkit.verify.strategies import Options, Run, get_strategy
from ckptkit.verify.workload import Workload


@dataclass(frozen=True, slots=True)
class Broken:
    """The strategy `inner`, spoilt in the way that `name` says."""

    name: str
    inner: str
    forms: tuple[str, ...] = ()
    package: str | None = None

    def build(self, workload: Workload, options: Options) -> Run:
        if self.name == "no-broadcast":
            options = replace(options, seed=dist.get_rank())
        if self.name == "deepspeed-clips":
            options = replace(options, details={"config": {"gradient_clipping": 0.3}})
        run: Any = get_strategy(self.inner).build(workload, options)
        if self.name == "one-weight-decay":
            for group in run.optimizer.param_groups:
                group["weight_decay"] = 0.1
        return run  # type: ignore[no-any-return]


no_broadcast = Broken("no-broadcast", "fsdp2")
deepspeed_clips = Broken("deepspeed-clips", "zero1", package="deepspeed")
one_weight_decay = Broken("one-weight-decay", "ddp")


@dataclass(frozen=True, slots=True)
class Raising:
    name: str = "raising"
    forms: tuple[str, ...] = ()
    package: str | None = None

    def build(self, workload: Workload, options: Options) -> Run:
        if self.package is not None:
            raise MissingPackageError(self.package, needed_for="this strategy", extra="all")
        raise RuntimeError("planted")


raising = Raising()
without_package = Raising(package="nonesuch")
