"""transformers' TrainingArguments in JSON: FSDP1 settings become FSDP2's; a DeepSpeed config is reported.

What: `fsdp_config` gets `"version": 2` and `reshard_after_forward`, and loses what FSDP2 does not have.

Before::

    {"fsdp": "shard_grad_op auto_wrap", "fsdp_config": {"use_orig_params": true}}

After::

    {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2,
    "reshard_after_forward": false, "cpu_ram_efficient_loading": true}}

In numbers: equal.

Known limits: no_shard, hybrid_shard and LOCAL_STATE_DICT are refused; `"deepspeed": ...` is left, because its
optimizer, scheduler, clipping and accumulation are then TrainingArguments' own: take it out and give fsdp and
fsdp_config. A file that is an `fsdp_config` alone gets its version; `reshard_after_forward` then follows from `fsdp` in
the call. All bytes but the changed entries stay.
"""

from __future__ import annotations

import json
from typing import Any

from .. import json_text
from ..grade import Grade
from ..json_text import Node, Splices
from ..trainer_settings import GONE, is_fsdp2, message_of, plain_name, to_fsdp2
from . import ConfigFile

SOURCES = ("fsdp1", "deepspeed")
SUFFIXES = (".json",)
_ALONE = ("transformer_layer_cls_to_wrap", "min_num_params", *GONE)


def claims(text: str) -> bool:
    """Whether a text holds TrainingArguments with FSDP or DeepSpeed, or is an `fsdp_config`."""
    known = '"output_dir"' in text or '"per_device_train_batch_size"' in text
    if known:
        return '"fsdp"' in text or '"deepspeed"' in text
    names = [f'"{prefix}{name}"' for name in _ALONE for prefix in ("", "fsdp_")]
    return any(name in text for name in names) and '"distributed_type"' not in text


def convert(file: ConfigFile) -> str:
    """The new text; the old one where nothing is to do or the settings are refused."""
    try:
        root = json_text.parse(file.text)
    except ValueError as error:
        file.note(Grade.MANUAL, f"cannot be read: {error}")
        return file.text
    tree = root.plain()
    if not isinstance(tree, dict):
        return file.text
    if "output_dir" not in tree and "per_device_train_batch_size" not in tree:
        return _alone(file, root, tree)
    if tree.get("deepspeed"):
        message = 'take "deepspeed" out and give "fsdp": "full_shard auto_wrap" with fsdp_config {"version": 2}'
        file.note(Grade.MANUAL, message, at='"deepspeed"')
    fsdp, config = tree.get("fsdp"), tree.get("fsdp_config") or {}
    words = " ".join(fsdp) if isinstance(fsdp, list) else "full_shard auto_wrap" if fsdp is True else fsdp
    if not words or not isinstance(words, str) or not isinstance(config, dict) or is_fsdp2(config):
        return file.text
    found = to_fsdp2(words, config)
    if isinstance(found, str):
        file.note(Grade.MANUAL, found, at='"fsdp"')
        return file.text
    splices = Splices(file.text)
    given, holder = root.get("fsdp"), root.get("fsdp_config")
    assert given is not None
    if found.fsdp != words:
        splices.put(given.start, given.stop, json.dumps(found.fsdp))
    if holder is None or holder.kind != "object":
        code = json.dumps(found.put)
        if holder is not None:
            splices.put(holder.start, holder.stop, code)
        else:
            splices.put(given.stop, given.stop, f'{_between(file.text, root)}"fsdp_config": {code}')
    else:
        _edit(splices, holder, found.put, found.drop)
    file.note(Grade.EXACT, message_of(found), at='"fsdp"')
    _say(file, found.drop, found.performance)
    return splices.applied()


def _alone(file: ConfigFile, root: Node, tree: dict[str, Any]) -> str:
    if is_fsdp2(tree) or not any(plain_name(key) in _ALONE for key in tree):
        return file.text
    found = to_fsdp2("", tree)
    if isinstance(found, str):
        file.note(Grade.MANUAL, found)
        return file.text
    said = any(plain_name(key) == "reshard_after_forward" for key in tree)
    put = (
        found.put
        if said
        else {key: value for key, value in found.put.items() if plain_name(key) != "reshard_after_forward"}
    )
    splices = Splices(file.text)
    _edit(splices, root, put, found.drop)
    file.note(Grade.EXACT, message_of(found))
    _say(file, found.drop, found.performance)
    return splices.applied()


def _say(file: ConfigFile, gone: list[str], performance: list[str]) -> None:
    if gone:
        file.note(Grade.EXACT, f"without counterpart: {', '.join(gone)}", at=f'"{gone[0]}"')
    for one in performance:
        file.note(Grade.PERFORMANCE, f"{one}: has no counterpart")


def _edit(splices: Splices, holder: Node, put: dict[str, Any], drop: list[str]) -> None:
    """Set values in place; a new entry takes the place of one that goes, else it stands before the first."""
    known = {entry.key: entry for entry in holder.entries}
    new = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in put.items() if key not in known]
    for key in put.keys() & known.keys():
        splices.put(known[key].value.start, known[key].value.stop, json.dumps(put[key]))
    between = _between(splices.text, holder)
    gone = [entry for entry in holder.entries if entry.key in drop]
    if new and gone:
        first = gone.pop(0)
        splices.put(first.start, first.value.stop, between.join(new))
    elif new and holder.entries:
        start = holder.entries[0].start
        splices.put(start, start, between.join(new) + between)
    elif new:
        splices.put(holder.start, holder.stop, "{" + ", ".join(new) + "}")
    kept = [entry for entry in holder.entries if entry not in gone]
    for entry in gone:
        later = [one for one in holder.entries if one.start > entry.start]
        before = [one for one in kept if one.start < entry.start]
        if later:
            splices.put(entry.start, later[0].start, "")
        elif before:
            splices.put(before[-1].value.stop, entry.value.stop, "")


def _between(text: str, holder: Node) -> str:
    """The comma and the white space that stand between two entries."""
    if len(holder.entries) > 1:
        return text[holder.entries[0].value.stop : holder.entries[1].start]
    return "," + (text[holder.start + 1 : holder.entries[0].start] or " ") if holder.entries else ", "
