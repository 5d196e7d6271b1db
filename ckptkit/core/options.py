"""What a person asks of reading and of writing: the options of the command line as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .assemble import Hints


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a source: what its files do not say themselves."""

    hints: Hints = field(default_factory=Hints)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How a container lays out its files. Each container reads the fields that concern it.

    `target` is the name that was asked for: a container may serve several (`zero1`, `zero2`). `source_world_size` is
    that of the source, for `world_size=None`. `sizes` and limits are in bytes. `mesh` is the device type and the
    dimension's name of the mesh that DTensors carry, `cuda:fsdp` or, without a name, `cuda`: torch loads a rank's file
    only into a model over an equal mesh. `fsdp_units`, `use_orig_params` and `fsdp_param_dtype` are what FSDP1 was
    given: the wrapped modules (class names, paths, globs of paths), and the `param_dtype` of its MixedPrecision.
    """

    target: str
    world_size: int | None = None
    source_world_size: int | None = None
    optimizer_keys: Literal["fqn", "id"] = "fqn"
    flat_optimizer: bool = False
    prefix: str = ""
    dtype: str | None = None
    max_shard_size: int = 5_000_000_000
    with_optimizer: bool = True
    single_file: bool = False
    ds_config: dict[str, object] | None = None
    mesh: str = "cuda:fsdp"
    fsdp_units: tuple[str, ...] = ()
    use_orig_params: bool = False
    fsdp_param_dtype: str | None = None
    hints: Hints = field(default_factory=Hints)

    @property
    def ranks(self) -> int:
        """The world size to write for: the one asked for, else that of the source, else 1."""
        return self.world_size or self.source_world_size or 1
