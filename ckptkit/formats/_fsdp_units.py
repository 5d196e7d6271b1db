"""FSDP1's units as its caller names them: which modules are wrapped, and what is in the flat parameter of each.

Sources (torch 2.13): a policy wraps children before parents, so that a parameter is of the nearest wrapped module above
it (distributed/fsdp/wrap.py `_recursive_wrap`); a class in `transformer_layer_cls` means its subclasses too
(`_module_wrap_policy`); a unit's parameters lie in the order of its modules (`_init_flat_param_and_metadata` in
_flat_param.py), with use_orig_params each at a multiple of 16 bytes of the dtype that is computed in, and the whole
padded for the number of ranks; without it nothing is padded but the last shards (`_get_shard`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..core.box import Shape
from ..core.checkpoint import ModelFacts
from ..core.dtype import ITEMSIZE
from ..core.fqn import join
from ..errors import UsageError
from ._rank_flat import ALIGNMENT, starts_of


@dataclass(frozen=True, slots=True)
class FlatUnit:
    """A wrapped module: its path, its parameters (`members`) with their shapes and first elements in the flat
    parameter, and that one's length `numel`, with what use_orig_params adds at the end."""

    path: str
    members: Mapping[str, Shape]
    starts: Mapping[str, int]
    numel: int
    dtype: str
    ranks: int

    @property
    def key(self) -> str:
        """The name of its flat parameter in a local state dict."""
        return join(self.path, "_flat_param")

    @property
    def size(self) -> int:
        """Elements of each rank's shard, with padding."""
        return -(-self.numel // self.ranks)

    def stored(self, rank: int) -> int:
        """Elements of a rank's shard without padding: none where the ranks before it have them all."""
        return max(0, min(self.size, self.numel - rank * self.size))

    def local(self, name: str, rank: int) -> tuple[int, int]:
        """The elements `[low, high)` of the parameter `name` that are in a rank's shard."""
        start, numel = self.starts[name], math.prod(self.members[name])
        low = max(0, rank * self.size - start)
        return low, max(low, min(numel, (rank + 1) * self.size - start))


@dataclass(frozen=True, slots=True)
class Wrapping:
    """How FSDP1 was called: which modules, how, over how many ranks; `param_dtype` is that of MixedPrecision."""

    names: Sequence[str]
    use_orig_params: bool
    ranks: int
    param_dtype: str | None = None


def flat_units(facts: ModelFacts, dtypes: Mapping[str, str], how: Wrapping) -> list[FlatUnit]:
    """The units of a model in the order in which the wrapped model yields their flat parameters: parents first.

    `dtypes` are those of the parameters. Raises UsageError naming everything that FSDP1 would not wrap like this.
    """
    paths = wrapped(facts, how.names)
    members: dict[str, dict[str, Shape]] = {path: {} for path in paths}
    for name, shape in facts.parameters.items():
        members[_home(name, paths)][name] = shape
    faults = [
        f"{alias} (in {_said(_home(alias, paths))}) is tied to {owner} (in {_said(_home(owner, paths))})"
        for alias, owner in facts.aliases.items()
        if _home(alias, paths) != _home(owner, paths)
    ]
    for path, held in members.items():
        faults += _unit_faults(path, held, facts, dtypes, how)
    if faults:
        raise UsageError(
            "FSDP1 cannot wrap the model in these units",
            why="a unit's parameters become one vector: of one dtype, with tied names together, none of them 0-d, and "
            "without use_orig_params all trained or all frozen",
            hint="name the units that the run to be resumed has: --fsdp-units, --use-orig-params",
            faults=faults,
        )
    return [_unit(path, held, dtypes, how) for path, held in members.items() if held]


def wrapped(facts: ModelFacts, names: Iterable[str]) -> list[str]:
    """The paths of the modules that are wrapped, the model's own ("") first.

    A name is a class's, or a path in which `*` stands in for (parts of) one module's name: `layers.*`.
    Raises UsageError for names that fit nothing, or both a class and a path.
    """
    found, faults = {""}, []
    for name in names:
        by_path = {path for path in facts.modules if path and _fits(path, name)}
        by_class = {path for path, classes in facts.modules.items() if name in classes}
        if by_path and by_class:
            faults.append(f"{name} is the path of a module and the name of a class")
        elif not by_path and not by_class:
            faults.append(f"{name} is neither")
        found |= by_path | by_class
    if faults:
        classes = sorted({kinds[0] for path, kinds in facts.modules.items() if path and kinds})
        raise UsageError(
            "--fsdp-units names modules that the model does not have",
            why="a unit is a class's name or a module's path, as in layers.0 or layers.*",
            hint=f"classes in the model: {', '.join(classes)}",
            faults=faults,
        )
    return [path for path in facts.modules if path in found]


def _fits(path: str, pattern: str) -> bool:
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _home(name: str, paths: Iterable[str]) -> str:
    """The nearest wrapped module above a parameter."""
    return max((path for path in paths if not path or name.startswith(f"{path}.")), key=len)


def _said(path: str) -> str:
    return path or "the model itself"


def _unit_faults(
    path: str, members: Mapping[str, Shape], facts: ModelFacts, dtypes: Mapping[str, str], how: Wrapping
) -> list[str]:
    faults = [f"{name} is 0-d" for name, shape in members.items() if not shape]
    kinds = sorted({dtypes[name] for name in members})
    if len(kinds) > 1:
        faults.append(f"{_said(path)} has parameters of {' and '.join(kinds)}")
    frozen = [name for name in members if name in facts.frozen]
    if frozen and len(frozen) < len(members) and not how.use_orig_params:
        faults.append(f"{_said(path)} has frozen parameters ({frozen[0]}) beside trained ones")
    return faults


def _unit(path: str, members: Mapping[str, Shape], dtypes: Mapping[str, str], how: Wrapping) -> FlatUnit:
    dtype = dtypes[next(iter(members))]
    if not how.use_orig_params:
        return FlatUnit(path, members, *starts_of(members, 1), dtype, how.ranks)
    starts, total = starts_of(members, max(1, ALIGNMENT // ITEMSIZE[how.param_dtype or dtype]))
    return FlatUnit(path, members, starts, -(-total // how.ranks) * how.ranks, dtype, how.ranks)
