"""YAML of axolotl, LLaMA-Factory and Trainer scripts: FSDP1 settings become FSDP2's; a DeepSpeed config is reported.

What: LLaMA-Factory's and other files of TrainingArguments get `version: 2` and `reshard_after_forward` in their
`fsdp_config`. axolotl's get `fsdp_version: 2`, lose the old `fsdp` list, and the prefix `fsdp_` of the keys in
`fsdp_config`. What FSDP2 does not have goes.

Why: both pass these settings on to transformers and accelerate, which take FSDP1 unless they are told otherwise.

Before::

    base_model: Qwen/Qwen3-8B
    fsdp:
      - full_shard
      - auto_wrap
    fsdp_config:
      fsdp_state_dict_type: FULL_STATE_DICT
      fsdp_transformer_layer_cls_to_wrap: Qwen3DecoderLayer

After::

    base_model: Qwen/Qwen3-8B
    fsdp_version: 2
    fsdp_config:
      auto_wrap_policy: TRANSFORMER_BASED_WRAP
      reshard_after_forward: true
      state_dict_type: FULL_STATE_DICT
      transformer_layer_cls_to_wrap: Qwen3DecoderLayer

In numbers: equal in fp32; `ckptkit explain trainer-arguments` says what bf16 changes.

Known limits: no_shard, hybrid_shard and LOCAL_STATE_DICT are refused. `deepspeed: ...` is left, because its optimizer,
scheduler and clipping are then the trainer's own. Comments, order and everything else stay. Read in transformers 5.24
training_args.py and in axolotl's docs/multi-gpu (its table of keys).
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any

from ..grade import Grade
from ..trainer_settings import SAME_WEIGHTS, is_fsdp2, message_of, plain_name, to_fsdp2
from ..yaml_lines import Lines, Tree, line_of, read
from . import ConfigFile

SOURCES = ("fsdp1", "deepspeed")
SUFFIXES = (".yaml", ".yml")
_OURS = re.compile(r"^(fsdp|fsdp_config|deepspeed)[ \t]*:", re.MULTILINE)
_TRAINER = re.compile(r"^(base_model|model_name_or_path|output_dir|per_device_train_batch_size)[ \t]*:", re.MULTILINE)


def claims(text: str) -> bool:
    """Whether a text holds a trainer's arguments with FSDP or DeepSpeed."""
    return bool(_OURS.search(text) and _TRAINER.search(text)) and "distributed_type:" not in text


def convert(file: ConfigFile) -> str:
    """The new text; the old one where nothing is to do or the settings are refused."""
    tree = read(file)
    if tree is None:
        return file.text
    if tree.get("deepspeed"):
        new = "fsdp_version: 2" if "base_model" in tree else "fsdp: full_shard auto_wrap"
        message = f"take deepspeed out and give {new} with an fsdp_config (reshard_after_forward: true for stage 3)"
        file.note(Grade.MANUAL, message, at="deepspeed")
        return file.text
    words, config = tree.get("fsdp"), tree.get("fsdp_config") or {}
    words = " ".join(map(str, words)) if isinstance(words, list) else "full_shard auto_wrap" if words is True else words
    is_axolotl = "base_model" in tree
    wanted = words or (is_axolotl and config)
    if not wanted or str(tree.get("fsdp_version")) == "2" or isinstance(config, str):
        return file.text
    if not isinstance(config, MutableMapping) or is_fsdp2(config):
        return file.text
    if config and line_of(config, next(iter(config))) <= line_of(tree, "fsdp_config"):
        file.note(Grade.MANUAL, "write fsdp_config as a block, one key a line, and migrate again", at="fsdp_config")
        return file.text
    text = str(words or "")
    strategy = config.get("fsdp_sharding_strategy")
    found = to_fsdp2(text if strategy is None else "", {**config, **_reshards(strategy)})
    if isinstance(found, str):
        file.note(Grade.MANUAL, found, at="fsdp")
        return file.text
    edits = Lines.of(file.text)
    first = line_of(config, next(iter(config))) if config else 0
    for key in config:
        if plain_name(key) in found.drop or key in found.drop:
            edits.dropped |= {line_of(config, key), *edits.block(line_of(config, key))}
    if is_axolotl:
        _axolotl(tree, config, edits, text, found.put, first)
    else:
        _transformers(tree, config, edits, found.fsdp, found.put, first)
    file.note(Grade.EXACT, SAME_WEIGHTS if is_axolotl else message_of(found), at="fsdp")
    for one in found.performance:
        file.note(Grade.PERFORMANCE, f"{one}: has no counterpart", at="fsdp")
    return edits.text()


def _reshards(strategy: object) -> dict[str, Any]:
    return {} if strategy is None else {"reshard_after_forward": strategy}


def _transformers(tree: Tree, config: Tree, edits: Lines, words: str, put: dict[str, Any], first: int) -> None:
    at = line_of(tree, "fsdp")
    if isinstance(tree["fsdp"], str) and tree["fsdp"] != words:
        edits.lines[at] = edits.lines[at].replace("shard_grad_op", "full_shard", 1)
    elif isinstance(tree["fsdp"], list):
        for index in (at, *edits.block(at)):
            edits.lines[index] = edits.lines[index].replace("shard_grad_op", "full_shard", 1)
    if not config:
        after = max((at, *edits.block(at))) + 1
        if "fsdp_config" in tree:
            edits.dropped.add(line_of(tree, "fsdp_config"))
        edits.inserted.setdefault(after, []).append("fsdp_config:\n")
        edits.insert(after, "  ", put)
        return
    for key, value in put.items():
        if key in config:
            edits.put(line_of(config, key), key, value)
        else:
            edits.insert(first, edits.indent(first), {key: value})


def _axolotl(tree: Tree, config: Tree, edits: Lines, words: str, put: dict[str, Any], first: int) -> None:
    head = line_of(tree, "fsdp_config") if config else line_of(tree, "fsdp")
    if "fsdp_version" in tree:
        edits.put(line_of(tree, "fsdp_version"), "fsdp_version", 2)
    else:
        edits.insert(head, "", {"fsdp_version": 2})
    if "fsdp" in tree:
        edits.dropped |= {line_of(tree, "fsdp"), *edits.block(line_of(tree, "fsdp"))}
    new: dict[str, Any] = {}
    given = {plain_name(key) for key in config}
    if "auto_wrap" in words and "auto_wrap_policy" not in given:
        new["auto_wrap_policy"] = "SIZE_BASED_WRAP" if "min_num_params" in given else "TRANSFORMER_BASED_WRAP"
    if "offload" in words.split() and "offload_params" not in given:
        new["offload_params"] = True
    flag = next(value for key, value in put.items() if plain_name(key) == "reshard_after_forward")
    old = next((key for key in config if plain_name(key) in ("sharding_strategy", "reshard_after_forward")), None)
    if old is None:
        new["reshard_after_forward"] = flag
    if not config:
        if "fsdp_config" in tree:
            edits.dropped.add(line_of(tree, "fsdp_config"))
        edits.inserted.setdefault(head, []).append("fsdp_config:\n")
        edits.insert(head, "  ", new)
        return
    edits.insert(first, edits.indent(first), new)
    for key in config:
        at = line_of(config, key)
        if key == old:
            edits.put(at, "reshard_after_forward", flag)
        elif at not in edits.dropped and plain_name(key) != key:
            edits.lines[at] = edits.lines[at].replace("fsdp_", "", 1)
