"""FSDP flags on command lines in shell scripts: `accelerate launch --use_fsdp ...` and `--fsdp` of a Trainer's script.

What: accelerate's flags get `--fsdp_version 2` and `--fsdp_reshard_after_forward` in the place of the sharding
strategy, and lose what FSDP2 does not have. `--fsdp "full_shard auto_wrap"` of scripts with transformers'
TrainingArguments (LLaMA-Factory and ms-swift too) gets an `--fsdp_config` with version 2, or has its inline one
changed.

Why: `accelerate launch` takes FSDP1 unless it is told the version, and so did the Trainer before transformers 5.

Before::

    accelerate launch --use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP --fsdp_use_orig_params true train.py

After::

    accelerate launch --use_fsdp --fsdp_version 2 --fsdp_reshard_after_forward false \
        --fsdp_state_dict_type FULL_STATE_DICT train.py

In numbers: equal.

Known limits: NO_SHARD, HYBRID_SHARD and LOCAL_STATE_DICT are left, as are values that hold shell variables. Without
`--fsdp_state_dict_type` accelerate saves a full state dict under FSDP1 and a sharded one under FSDP2: it is spelled
out. Quoting, line breaks and comments stay. Read in accelerate 1.15 commands/launch.py and transformers 5.24
training_args.py.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from ..grade import Grade
from ..trainer_settings import GONE, LOCAL, NO_SHARD, RESHARDS, is_fsdp2, message_of, strategy_of, to_fsdp2
from . import ConfigFile

SOURCES = ("fsdp1",)
SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")

_COMMAND = re.compile(r"(?:[^\n\\]|\\.|\\\n)+")
_SPACE = r"(?:[ \t]|\\\n)"
_VALUE = r"'[^']*'|\"(?:[^\"\\]|\\.)*\"|(?!-)(?:[^\s\\]|\\[^\n])+"
_TRUE = ("true", "1", "yes")
# transformers' `FSDPOption`, and flags that scripts with its TrainingArguments are given
_OPTIONS = {"full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "offload", "auto_wrap"}
_TRAINERS = re.compile(r"--(?:output_dir|per_device_train_batch_size|model_name_or_path)\b")


def claims(text: str) -> bool:
    """Whether a text holds a command with FSDP flags."""
    return "--use_fsdp" in text or "--fsdp" in text


def convert(file: ConfigFile) -> str:
    """The new text; commands that are refused stay as they are."""
    out: list[str] = []
    at = 0
    for match in _COMMAND.finditer(file.text):
        out.append(file.text[at : match.start()])
        at = match.end()
        line = match.group()
        command = _Command(file, line, file.text.count("\n", 0, match.start()) + 1)
        if not line.lstrip().startswith("#"):
            if re.search(r"--use_fsdp\b", line):
                _accelerate(command)
            elif re.search(r"--fsdp\b(?!_)", line):
                _trainer(command)
        out.append(command.text())
    return "".join([*out, file.text[at:]])


@dataclass(slots=True)
class _Command:
    """One logical line, and the edits of its flags."""

    file: ConfigFile
    line: str
    number: int
    edits: list[tuple[int, int, str]] = field(default_factory=list)

    def flag(self, name: str) -> re.Match[str] | None:
        """A flag (group 1: its value, if it has one)."""
        return re.search(rf"(?<!\S)--{name}(?:(?:=|{_SPACE}+)({_VALUE}))?(?!\S)", self.line)

    def value(self, name: str) -> str | None:
        """The value of a flag without its quotes; `true` for a bare one, None where it is not given."""
        found = self.flag(name)
        if found is None:
            return None
        text = found.group(1)
        return "true" if text is None else text[1:-1] if text[:1] in ("'", '"') else text

    def put(self, found: re.Match[str], new: str) -> None:
        self.edits.append((found.start(), found.end(), new))

    def drop(self, name: str) -> None:
        """Take a flag out, with its line where it has one for itself."""
        found = self.flag(name)
        if found is None:
            return
        start, stop = found.span()
        before = re.search(r"(?:^|\n)[ \t]*$", self.line[:start])
        after = re.match(r"[ \t]*\\\n", self.line[stop:])
        if before and after and start:
            self.edits.append((start, stop + re.match(r"[ \t]*\\\n[ \t]*", self.line[stop:]).end(), ""))  # type: ignore[union-attr]
        else:
            lead = re.search(rf"{_SPACE}*$", self.line[:start])
            self.edits.append((lead.start() if lead else start, stop, ""))

    def follow(self, found: re.Match[str], new: list[str]) -> None:
        """Insert flags behind another, in its style: on lines of their own where it has one."""
        own = re.search(r"\\\n([ \t]*)$", self.line[: found.start()])
        lead = f" \\\n{own.group(1)}" if own else " "
        self.edits.append((found.end(), found.end(), "".join(lead + one for one in new)))

    def note(self, grade: Grade, message: str) -> None:
        self.file.note(grade, message, line=self.number)

    def text(self) -> str:
        out, at = [], 0
        for start, stop, new in sorted(self.edits):
            out += [self.line[at:start], new]
            at = stop
        return "".join([*out, self.line[at:]])


def _accelerate(command: _Command) -> None:
    start = command.flag("use_fsdp")
    if start is None or command.value("fsdp_version") == "2":
        return
    given = command.value("fsdp_sharding_strategy") or command.value("fsdp_reshard_after_forward") or "FULL_SHARD"
    strategy = strategy_of(given)
    reason = ""
    if "$" in given or (strategy not in RESHARDS and strategy != "NO_SHARD"):
        reason = f"the sharding strategy {given} is not known: give --fsdp_version 2 --fsdp_reshard_after_forward true"
    elif strategy == "NO_SHARD":
        reason = NO_SHARD + ": --multi_gpu in the place of --use_fsdp"
    elif strategy.startswith("HYBRID"):
        reason = "HYBRID_SHARD: --use_parallelism_config with --parallelism_config_dp_replicate_size and _dp_shard_size"
    elif (command.value("fsdp_state_dict_type") or "").upper() == "LOCAL_STATE_DICT":
        reason = LOCAL
    if reason:
        command.note(Grade.MANUAL, reason)
        return
    new = []
    reshards = f"--fsdp_reshard_after_forward {str(RESHARDS[strategy]).lower()}"
    old = command.flag("fsdp_sharding_strategy") or command.flag("fsdp_reshard_after_forward")
    version = command.flag("fsdp_version")
    if version:
        command.put(version, "--fsdp_version 2")
    else:
        new.append("--fsdp_version 2")
    if old:
        command.put(old, reshards)
    else:
        new.append(reshards)
    if command.flag("fsdp_state_dict_type") is None:
        new.append("--fsdp_state_dict_type FULL_STATE_DICT")
    command.follow(start, new)
    for name in GONE:
        command.drop(f"fsdp_{name}")
    command.note(Grade.EXACT, f"FSDP2; {strategy} becomes {reshards}")


def _trainer(command: _Command) -> None:
    found, words = command.flag("fsdp"), command.value("fsdp")
    if found is None or words is None or words == "":
        return
    if words.lower() in _TRUE and not _TRAINERS.search(command.line):
        return  # a switch of that name in a script of its own
    words = "full_shard auto_wrap" if words.lower() in _TRUE else words
    if "$" not in words and not set(words.replace(",", " ").split()) <= _OPTIONS:
        return
    given = command.value("fsdp_config")
    inline = given is not None and given.lstrip().startswith("{")
    if "$" in words or (given and "$" in given):
        command.note(Grade.MANUAL, 'the FSDP settings are in shell variables: --fsdp_config must say "version": 2')
        return
    if given is not None and not inline:
        command.note(Grade.EXACT, f"the settings are in {given}, which is migrated if it is of this run")
        return
    try:
        config = json.loads(given.replace('\\"', '"')) if given else {}
    except ValueError:
        command.note(Grade.MANUAL, 'the inline --fsdp_config is no JSON: it must say "version": 2')
        return
    if is_fsdp2(config):
        return
    layer = command.value("fsdp_transformer_layer_cls_to_wrap")
    if layer is not None and "$" not in layer:
        config = {**config, "transformer_layer_cls_to_wrap": layer.split(",")}
        command.drop("fsdp_transformer_layer_cls_to_wrap")
    settings = to_fsdp2(words, config)
    if isinstance(settings, str):
        command.edits.clear()
        command.note(Grade.MANUAL, settings)
        return
    kept = {key: value for key, value in config.items() if key not in settings.drop and key not in settings.put}
    code = f"'{json.dumps({**settings.put, **kept})}'"
    if settings.fsdp != words:
        quoted = found.group(1)[:1] if found.group(1) and found.group(1)[:1] in ("'", '"') else ""
        command.put(found, f"--fsdp {quoted}{settings.fsdp}{quoted}" if quoted else f"--fsdp '{settings.fsdp}'")
    if (old := command.flag("fsdp_config")) is not None:
        command.put(old, f"--fsdp_config {code}")
    else:
        command.follow(found, [f"--fsdp_config {code}"])
    command.note(Grade.EXACT, message_of(settings))
