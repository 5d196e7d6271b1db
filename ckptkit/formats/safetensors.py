"""safetensors: weights in one file, or a Hugging Face folder with an index; also `pytorch_model*.bin` with its index.

What: an 8-byte length, a JSON header with name -> dtype, shape, byte range, then the bytes. A folder may split the
tensors over files named in `model.safetensors.index.json` (or `pytorch_model.bin.index.json` for torch files).

Written: `model.safetensors`, or shards of at most `--max-shard-size` with an index, metadata `format: pt`. Of tied
tensors the owner is written and the alias is noted in the metadata, as `safetensors.torch.save_model` does;
transformers ties them again. With `--optimizer` a second file, `optimizer.safetensors`, holds `<fqn>.<slot>` and the
parameter groups and extras as JSON in its metadata.

Limits: without `--optimizer` this target holds weights only: the optimizer and the extras are drops.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..core.box import whole
from ..core.checkpoint import Contents, Drop
from ..core.dtype import ITEMSIZE
from ..core.layout import Body, Layout, OutFile, Raw
from ..core.options import ReadOptions, WriteOptions
from ..core.spec import Tensor, TensorKey
from ..core.tree import is_tensors, outline
from ..errors import SourceError, UsageError
from ..io.safetensors_file import DTYPES, SHARDING, read_file, read_header
from ..io.torch_file import is_torch_file, load_tree
from ._json_tree import decoded, said, unsaid

NAME = "safetensors"
_NAMES = {name: code for code, name in DTYPES.items()}
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLES = ("model.safetensors", "pytorch_model.bin")
_OPTIMIZER = "optimizer.safetensors"
_GROUPS, _EXTRAS, _VALUES, _FORMAT = "ckptkit.param_groups", "ckptkit.extras", "optimizer_values", {"format": "pt"}


def detect(path: Path) -> str | None:
    if path.is_file():
        if path.suffix != ".safetensors" or SHARDING in _metadata(path):
            return None
        return "a safetensors file"
    if any((path / "sharded").glob("shard-*.safetensors")):
        return None  # DCP consolidated it, losing 0-d tensors, and kept the shards: its own container reads those
    for name in (*_INDEXES, *_SINGLES):
        if (path / name).is_file():
            return None if name.endswith(".safetensors") and SHARDING in _metadata(path / name) else name
    return None


def _metadata(path: Path) -> Mapping[str, Any]:
    try:
        return read_header(path)[0].get("__metadata__", {})
    except SourceError:
        return {}


def read(path: Path, options: ReadOptions) -> Contents:
    files, evidence, indexed = _files(path)
    tensors: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    for file in files:
        found, notes = _read_file(file)
        doubled = sorted(set(found) & set(tensors))
        if doubled:
            raise SourceError(
                f"{file} holds tensors that another file holds too",
                why="files of two saves lie in one folder",
                hint="restore the files of one save",
                faults=doubled[:20],
            )
        tensors |= found
        metadata |= notes
    absent = sorted(indexed - set(tensors) - set(metadata))
    if absent:
        raise SourceError(
            f"{path} lacks {len(absent)} tensors that its index names",
            why="the files are of another save than the index",
            hint="restore the files of one save",
            faults=absent[:20],
        )
    # `save_model` notes alias -> owner beside `format`; a note whose owner is no tensor is somebody's own metadata.
    aliases = {alias: owner for alias, owner in metadata.items() if owner in tensors and alias not in tensors}
    model = {**tensors, **{alias: tensors[owner] for alias, owner in aliases.items()}}
    tree: dict[str, Any] = {"model": model}
    optimizer = (path if path.is_dir() else path.parent) / _OPTIMIZER
    if path.is_dir() and optimizer.is_file():
        tree |= _read_optimizer(optimizer)
    return Contents(NAME, tree, evidence, world_size=1, facts={"aliases": aliases, "ordered": False})


def _files(path: Path) -> tuple[list[Path], str, set[str]]:
    """The files that hold the weights, the evidence, and the tensors that an index says they hold."""
    if path.is_file():
        return [path], "a safetensors file", set()
    for name in _INDEXES:
        if (path / name).is_file():
            try:
                weights = {str(k): str(v) for k, v in json.loads((path / name).read_text())["weight_map"].items()}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise SourceError(f"{path / name} is no index", why=repr(error), hint="copy it again") from error
            names = sorted(set(weights.values()))
            bad = [each for each in names if Path(each).name != each]
            if bad:
                raise SourceError(
                    f"{path / name} points outside of its folder",
                    why="an index names files beside it, and nothing else is read",
                    hint="ask where this checkpoint comes from",
                    faults=bad,
                )
            missing = [each for each in names if not (path / each).is_file()]
            if missing:
                raise SourceError(
                    f"{path} lacks {len(missing)} of the {len(names)} files that its index names",
                    why="they were not copied, or the save was interrupted",
                    hint="copy the missing files",
                    faults=missing,
                )
            return [path / each for each in names], name, set(weights)
    single = next((name for name in _SINGLES if (path / name).is_file()), None)
    if single is None:
        raise SourceError(
            f"{path} holds no weights that Hugging Face's libraries would find",
            why=f"there is none of {', '.join((*_INDEXES, *_SINGLES))}",
            hint="name the file itself",
        )
    return [path / single], single, set()


def _read_file(path: Path) -> tuple[Mapping[str, Any], dict[str, str]]:
    if is_torch_file(path):
        tree = load_tree(path)
        if not is_tensors(tree):
            raise SourceError(
                f"{path} holds no state dict", why=f"it saw {outline(tree)}", hint="--from full reads other torch files"
            )
        return tree, {}
    return read_file(path)


def _read_optimizer(path: Path) -> dict[str, Any]:
    tensors, metadata = _read_file(path)
    try:
        groups = decoded(json.loads(metadata.get(_GROUPS, "[]")), tensors)
        extras = decoded(json.loads(metadata.get(_EXTRAS, "{}")), tensors)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise SourceError(
            f"{path} has no sound optimizer metadata", why=repr(error), hint="copy it again from where it was written"
        ) from error
    state: dict[str, dict[str, Any]] = extras.pop(_VALUES, {})
    for name, tensor in tensors.items():
        if not name.startswith(f"{_EXTRAS}."):
            fqn, _, slot = name.rpartition(".")
            state.setdefault(fqn, {})[slot] = tensor
    return {**extras, "optimizer": {"state": state, "param_groups": groups}}


def drops(contents: Contents, options: WriteOptions) -> Iterator[Drop]:
    """Without the optimizer files: all but the weights. With them: only what JSON cannot say."""
    for role, tree in contents.tree.items():
        if role == "model":
            for name, value in tree.items():
                if not isinstance(value, Tensor):
                    yield Drop(f"model.{name}", "it is no tensor, and safetensors holds nothing else")
                elif value.spec.dtype not in _NAMES:
                    yield Drop(f"model.{name}", f"safetensors has no dtype {value.spec.dtype}")
        elif not options.with_optimizer:
            yield Drop(role, "safetensors holds weights only; --optimizer writes a second file for it")
        else:
            yield from unsaid(role, tree)


def layout(contents: Contents, options: WriteOptions) -> Layout:
    model = {name: value for name, value in contents.tree["model"].items() if isinstance(value, Tensor)}
    model = {name: value for name, value in model.items() if value.spec.dtype in _NAMES}
    aliases = {alias: owner for alias, owner in contents.facts.get("aliases", {}).items() if alias in model}
    owned = {name: tensor for name, tensor in model.items() if name not in aliases}
    files = _weights(owned, aliases, options.max_shard_size)
    if options.with_optimizer and len(contents.tree) > 1:
        files = [_optimizer_file(contents.tree), *files]
    if options.single_file and len(files) > 1:
        raise UsageError(
            f"the target is one .safetensors file and {len(files)} are to be written",
            why="the weights are more than --max-shard-size, or --optimizer asks for a second file",
            hint="name a folder, or give a greater --max-shard-size",
        )
    return Layout(tuple(files), is_file=options.single_file)


def _weights(tensors: Mapping[str, Tensor], aliases: Mapping[str, str], limit: int) -> list[OutFile]:
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.spec.nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.spec.nbytes
    if len(shards) == 1:
        return [_file("model.safetensors", shards[0], {**_FORMAT, **aliases})]
    files: list[OutFile] = []
    where: dict[str, str] = {}
    for index, shard in enumerate(shards, 1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        held = {alias: owner for alias, owner in aliases.items() if owner in shard}
        files.append(_file(file, shard, {**_FORMAT, **held}))
        where |= dict.fromkeys(shard, file)
    total = sum(tensor.spec.nbytes for tensor in tensors.values())
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, indent=2)
    return [*files, OutFile("model.safetensors.index.json", (Raw(f"{index_text}\n".encode()),))]


def _file(name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> OutFile:
    # Widest elements first, as the library does: every tensor is aligned to its own width.
    ordered = sorted(tensors.items(), key=lambda item: (-ITEMSIZE[item[1].spec.dtype], item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for fqn, tensor in ordered:
        end = at + tensor.spec.nbytes
        header[fqn] = {"dtype": _NAMES[tensor.spec.dtype], "shape": list(tensor.spec.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    bodies = [Body(TensorKey(fqn), tensor, whole(tensor.spec.shape), tensor.spec.dtype) for fqn, tensor in ordered]
    return OutFile(name, (Raw(struct.pack("<Q", len(text)) + text), *bodies))


def _optimizer_file(tree: Mapping[str, Any]) -> OutFile:
    tensors: dict[str, Tensor] = {}
    optimizer = tree.get("optimizer") or {}
    for fqn, slots in optimizer.get("state", {}).items():
        tensors |= {f"{fqn}.{slot}": value for slot, value in slots.items() if isinstance(value, Tensor)}
    groups = said(optimizer.get("param_groups", []), tensors, f"{_EXTRAS}.param_groups")
    extras = {name: value for name, value in tree.items() if name not in ("model", "optimizer")}
    values = {
        fqn: {slot: value for slot, value in slots.items() if not isinstance(value, Tensor)}
        for fqn, slots in optimizer.get("state", {}).items()
    }
    values = {fqn: slots for fqn, slots in values.items() if slots}
    rest = said({**extras, **({_VALUES: values} if values else {})}, tensors, _EXTRAS)
    return _file(_OPTIMIZER, tensors, {**_FORMAT, _GROUPS: json.dumps(groups), _EXTRAS: json.dumps(rest)})
