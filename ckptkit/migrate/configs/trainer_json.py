"""transformers' TrainingArguments in JSON: FSDP1 settings become FSDP2's; a DeepSpeed config is reported.

What: `fsdp_config` gets `"version": 2` and `reshard_after_forward`, and loses what FSDP2 does not have.

Before::

    {"fsdp": "shard_grad_op auto_wrap", "fsdp_config": {"use_orig_params": true}}

After::

    {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2, "reshard_after_forward": false}}

In numbers: equal.

Known limits: no_shard, hybrid_shard and LOCAL_STATE_DICT are refused; `"deepspeed": ...` is left, because clipping,
accumulation and precision are then TrainingArguments' own: take it out and give fsdp and fsdp_config. The layout of the
file is kept as far as its indentation tells.
"""

from __future__ import annotations

import json
import re

from ..grade import Grade
from ..trainer_settings import to_fsdp2
from . import ConfigFile

SOURCES = ("fsdp1", "deepspeed")
SUFFIXES = (".json",)
_INDENT = re.compile(r"^\{\s*\n([ \t]+)")


def claims(text: str) -> bool:
    """Whether a text holds TrainingArguments with FSDP or DeepSpeed."""
    known = '"output_dir"' in text or '"per_device_train_batch_size"' in text
    return known and ('"fsdp"' in text or '"deepspeed"' in text)


def convert(file: ConfigFile) -> str:
    """The new text; the old one where nothing is to do or the settings are refused."""
    try:
        tree = json.loads(file.text)
    except ValueError as error:
        file.note(Grade.MANUAL, f"cannot be read: {error}")
        return file.text
    if not isinstance(tree, dict):
        return file.text
    if tree.get("deepspeed"):
        message = 'take "deepspeed" out and give "fsdp": "full_shard auto_wrap" with fsdp_config {"version": 2}'
        file.note(Grade.MANUAL, message, at='"deepspeed"')
    fsdp, config = tree.get("fsdp"), tree.get("fsdp_config") or {}
    fsdp = " ".join(fsdp) if isinstance(fsdp, list) else fsdp
    if not fsdp or not isinstance(fsdp, str) or not isinstance(config, dict) or config.get("version") in (2, "2"):
        return file.text
    found = to_fsdp2(fsdp, config)
    if isinstance(found, str):
        file.note(Grade.MANUAL, found, at='"fsdp"')
        return file.text
    tree["fsdp"], tree["fsdp_config"], gone = found
    file.note(Grade.EXACT, "FSDP2 settings", at='"fsdp"')
    if gone:
        file.note(Grade.EXACT, f"without counterpart: {', '.join(gone)}", at='"fsdp_config"')
    indent = _INDENT.match(file.text)
    return json.dumps(tree, indent=indent.group(1) if indent else None, ensure_ascii=False) + (
        "\n" if file.text.endswith("\n") else ""
    )
