"""full: one torch file with everything whole, as `torch.save` writes it (DDP, FSDP1 FULL_STATE_DICT, single process).

What: a zip (or, before torch 1.6 and with `_use_new_zipfile_serialization=False`, a legacy) torch file. Tensors are
whole; tensors that share a storage are one tensor under several names (tied weights).

Written: `{"model": {fqn: tensor}, "optimizer": {"state": {...}, "param_groups": [...]}, extras...}` or what the target
dialect asks for. Optimizer keys are FQNs or, with `--optimizer-keys id`, integers as `optimizer.load_state_dict` wants
them. The file is laid out to the byte before a tensor is read, so it needs no memory of its own size.

Limits: a pickled `nn.Module` is refused (save its `state_dict()`); files from big-endian machines are refused.
"""

from __future__ import annotations

from pathlib import Path

from ..core.checkpoint import Contents
from ..core.layout import Layout, OutFile
from ..core.options import ReadOptions, WriteOptions
from ..core.rank_names import rank_of
from ..core.spec import Tensor, TensorKey
from ..core.tree import Opaque, dotted, walk
from ..errors import SourceError
from ..io.torch_file import is_torch_file, load_tree
from ..io.torch_layout import tensor_content, torch_file

NAME = "full"
TARGETS = {"ddp": "a torch file that a DDP script loads"}


def detect(path: Path) -> str | None:
    if not path.is_file() or not is_torch_file(path):
        return None
    named = rank_of(path.name)
    others = [rank_of(other.name) for other in path.parent.iterdir() if other.name != path.name] if named else []
    if named and (named.world_size or any(other and other.stem == named.stem for other in others)):
        return None  # one of a set: rank_files
    return "a torch file"


def read(path: Path, options: ReadOptions) -> Contents:
    tree = load_tree(path)
    if isinstance(tree, Opaque):
        raise SourceError(
            f"{path} holds an {tree} as a whole",
            why="a pickled module or trainer can only be read by importing its class",
            hint="load it where its class is, and save its state_dict()",
        )
    return Contents(NAME, tree, "a torch file", world_size=1)


def layout(contents: Contents, options: WriteOptions) -> Layout:
    leaves = reversed(list(walk(contents.tree)))
    names = {id(value): dotted(path) for path, value in leaves if isinstance(value, Tensor)}
    segments = torch_file(contents.tree, tensor_content(lambda tensor: TensorKey(names[id(tensor)])))
    return Layout((OutFile("checkpoint.pt", tuple(segments)),), is_file=True)
