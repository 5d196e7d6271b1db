"""Save a live model of any strategy in any format: each rank writes the boxes that it owns, then they are converted."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..conversion import ConvertReport, Options, write_checkpoint
from ..core.box import Box
from ..core.place import Constant
from ..core.spec import Piece, Tensor, TensorKey, TensorSpec
from ..core.tree import TensorRef, Tree, mapped
from ..errors import SourceError
from ..io.move import dtype_name
from ..io.places import FileExtent
from ..io.stage import check_target
from ..opened import OpenCheckpoint
from .adapt import adapt
from .collective import everyone as gathered
from .collective import rank, same, together, world
from .holder import Live, local_of

_Row = tuple[
    str, str, tuple[int, ...], str, tuple[int, ...], tuple[int, ...]
]  # fqn, slot, shape, dtype, offsets, sizes


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    format: str = "dcp",
    step: int | None = None,
    extras: Mapping[str, Tree] | None = None,
    **options: Any,
) -> ConvertReport | None:
    """Save model, optimizer, groups and scheduler to `path` as `format`; the mirror of `load`. Call it on every rank.

    `options` are those of `convert` (`world_size`, `dialect`, `dtype`, `overwrite`, ...); `extras` are written beside
    the rest. Nothing is gathered: ranks write their boxes to a folder beside the target, and rank 0 converts that in
    bounded memory and removes it. The folder must be on a file system that all ranks share.
    Returns the report on rank 0 and None elsewhere. Raises, on every rank, what `convert` raises.
    """
    live = adapt(model, optimizer)
    me, target = rank(), Path(path)
    parts = target.absolute().with_name(f".{target.name}.ckptkit-parts-{same(uuid.uuid4().hex[:8])}")
    chosen = Options(to=format, **options)
    together(lambda: check_target(target, overwrite=chosen.overwrite) if me == 0 else None)
    together(lambda: parts.mkdir(parents=True) if me == 0 else None)
    report: ConvertReport | None = None
    try:
        together(lambda: _write_part(live, parts))

        def convert() -> None:
            nonlocal report
            if me == 0:
                source = _assembled(live, parts, scheduler, step, dict(extras or {}))
                report = write_checkpoint(source, target, chosen)

        together(convert)
    finally:
        if me == 0:
            shutil.rmtree(parts, ignore_errors=True)
    return report


def _pieces(live: Live) -> Iterator[tuple[_Row, torch.Tensor]]:
    groups = (
        ("value", [(holder, holder.local) for holder in live.values]),
        ("master", [(holder, holder.local) for holder in live.masters]),
    )
    for slot, holders in groups:
        for holder, local in holders:
            yield from _views(holder, local, slot)
    for holder in live.trained:
        state = live.optimizer.state.get(holder.key, {}) if live.optimizer is not None else {}
        for slot, value in state.items():
            if isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(holder.key.shape) and value.dim():
                yield from _views(holder, local_of(value), slot)


def _views(holder: Any, local: torch.Tensor, slot: str) -> Iterator[tuple[_Row, torch.Tensor]]:
    for share in holder.shares:
        for box, view in share.views(local):
            yield (share.fqn, slot, share.shape, dtype_name(view.dtype), box.offsets, box.sizes), view


def _write_part(live: Live, folder: Path) -> None:
    """This rank's boxes, packed one after another, and an index. A box that several ranks hold is the first one's."""
    pieces = list(_pieces(live))
    taken = {row for rows in gathered([row for row, _ in pieces])[: rank()] for row in rows}
    index = []
    with open(folder / f"{rank()}.bin", "wb") as file:
        for row, view in pieces:
            if row not in taken:
                index.append([*row, file.tell()])
                file.write(view.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
    singles = _singles(live)
    body = {"index": index, "singles": singles}
    (folder / f"{rank()}.json").write_text(json.dumps(body))


def _singles(live: Live) -> list[Any]:
    """Optimizer states of no parameter's shape (steps): small, so they go into the index as bytes."""
    out = []
    for holder in live.trained:
        state = live.optimizer.state.get(holder.key, {}) if live.optimizer is not None else {}
        for slot, value in state.items():
            if isinstance(value, int) and not isinstance(value, bool) and slot == "step":
                value = torch.tensor(float(value))
            if not isinstance(value, torch.Tensor) or (value.dim() and tuple(value.shape) == tuple(holder.key.shape)):
                continue
            data = local_of(value).contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes().hex()
            out += [[s.fqn, slot, list(value.shape), dtype_name(value.dtype), data] for s in holder.shares]
    return out


def _assembled(live: Live, folder: Path, scheduler: Any, step: int | None, extras: dict[str, Tree]) -> OpenCheckpoint:
    pieces: dict[TensorKey, list[Piece]] = {}
    specs: dict[TensorKey, TensorSpec] = {}
    for number in range(world()):
        body = json.loads((folder / f"{number}.json").read_text())
        for fqn, slot, shape, dtype, offsets, sizes, at in body["index"]:
            key = TensorKey(fqn, slot)
            specs[key] = TensorSpec(tuple(shape), dtype, _role(live, key))
            place = FileExtent(str(folder / f"{number}.bin"), at)
            pieces.setdefault(key, []).append(Piece(Box(tuple(offsets), tuple(sizes)), place, dtype))
        for fqn, slot, shape, dtype, data in body["singles"]:
            key = TensorKey(fqn, slot)
            tensor = Tensor.at(Constant(bytes.fromhex(data)), tuple(shape), dtype, "optim")
            if key in specs and bytes.fromhex(data) != pieces[key][0].place.data:  # type: ignore[attr-defined]
                raise SourceError(
                    f"ranks disagree on {key}",
                    why="their runs have come apart",
                    hint="compare the ranks' steps before saving",
                )
            specs[key], pieces[key] = tensor.spec, list(tensor.pieces)
    entries = {key: Tensor(spec, tuple(pieces[key])) for key, spec in specs.items()}
    # In an fp32 run the masters are the values; DeepSpeed keeps them apart all the same.
    for key in [key for key in entries if key.slot == "master"]:
        value = TensorKey(key.fqn)
        if value in entries and entries[value].spec.dtype == entries[key].spec.dtype:
            entries[value] = entries.pop(key).with_role("param")
    _add_extras(entries, extras, live, scheduler, step)
    ordered = [share.fqn for holder in live.values for share in holder.shares]
    rank_of = {fqn: index for index, fqn in enumerate(dict.fromkeys(ordered))}
    return OpenCheckpoint(
        path=str(folder),
        format="live",
        dialect=live.kind,
        evidence=(f"a live {live.kind} model",),
        world_size=world(),
        entries=dict(sorted(entries.items(), key=lambda item: rank_of.get(item[0].fqn, len(rank_of)))),
        param_groups=[
            {**{k: v for k, v in group.items() if k != "params"}, "params": names} for group, names in live.groups
        ],
        aliases=dict(live.aliases),
        extras=extras,
    )


def _role(live: Live, key: TensorKey) -> Any:
    if key.slot not in ("value", "master"):
        return "optim"
    return "buffer" if key.fqn in live.buffers else "frozen" if key.fqn in live.frozen else "param"


def _add_extras(
    entries: dict[TensorKey, Tensor], extras: dict[str, Tree], live: Live, scheduler: Any, step: int | None
) -> None:
    """The scheduler, the counters, and what the caller gave; tensors in them become entries."""
    chosen = scheduler if scheduler is not None else live.scheduler
    if chosen is not None and "scheduler" not in extras:
        extras["scheduler"] = dict(chosen.state_dict())
    for name, (owner, attribute) in live.counters.items():
        extras.setdefault(name, getattr(owner, attribute))
    if step is not None:
        extras["step"] = step

    def leaf(path: tuple[Any, ...], value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = TensorKey(".".join(map(str, path)), "extra")
        data = value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        entries[key] = Tensor.at(Constant(data), tuple(value.shape), dtype_name(value.dtype), "extra")
        return TensorRef(key)

    for name in list(extras):
        extras[name] = mapped(extras[name], leaf, (name,))
