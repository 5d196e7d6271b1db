"""Lines that launch a script with deepspeed, or name DeepSpeed to a framework, get a suggestion in the report.

What: `deepspeed train.py ...` in shell scripts and READMEs is reported with the `torchrun` line that launches the
migrated script; `--deepspeed` arguments of ms-swift and LLaMA-Factory commands with what to set instead. The files stay
as they are.

Why: a migrated script takes no DeepSpeed arguments, and its ranks from the environment.

Before::

    deepspeed --num_gpus 8 train.py --deepspeed --deepspeed_config ds.json --lr 1e-4

Suggested::

    torchrun --nproc_per_node=8 train.py --lr 1e-4

In numbers: nothing.

Known limits: host files have no counterpart: give torchrun --nnodes, --node_rank and --rdzv_endpoint on each host.
"""

from __future__ import annotations

import re
import shlex

from ..grade import Grade
from . import ConfigFile

SOURCES = ("deepspeed",)
SUFFIXES = (".sh", ".bash", ".md")

_LAUNCH = re.compile(r"^[\s$>`]*(?:[A-Z_]+=\S+\s+)*deepspeed\s+\S")
_FRAMEWORK = re.compile(r"\b(swift\s+(?:sft|pt|rlhf|dpo)|llamafactory-cli\s+train|FORCE_TORCHRUN=1)\b")
_WITH_VALUE = {
    "--num_gpus": "--nproc_per_node",
    "--num_nodes": "--nnodes",
    "--master_port": "--master_port",
    "--master_addr": "--master_addr",
    "--node_rank": "--node_rank",
}


def claims(text: str) -> bool:
    """Whether a text mentions DeepSpeed."""
    return "deepspeed" in text


def convert(file: ConfigFile) -> str:
    """Report the lines; the text stays."""
    for line in _logical_lines(file.text):
        flat = " ".join(line.replace("\\\n", " ").split())
        first = line.strip().splitlines()[0] if line.strip() else ""
        if _LAUNCH.search(line) and ".py" in flat:
            suggestion = _torchrun(flat.strip("`$> "))
            if suggestion:
                file.note(Grade.MANUAL, f"launch the migrated script with: {suggestion}", at=first)
        elif _FRAMEWORK.search(flat) and "--deepspeed" in flat:
            message = (
                "pass FSDP2 settings in the place of --deepspeed: --fsdp 'full_shard auto_wrap' and --fsdp_config "
            )
            file.note(Grade.MANUAL, message + "'{\"version\": 2, ...}'", at=first)
    return file.text


def _logical_lines(text: str) -> list[str]:
    return re.findall(r"(?:[^\n\\]|\\.|\\\n)+", text)


def _torchrun(command: str) -> str:
    try:
        words = shlex.split(command, posix=False)
    except ValueError:
        words = command.split()
    at = words.index("deepspeed") if "deepspeed" in words else -1
    script = next((i for i in range(at + 1, len(words)) if words[i].endswith(".py")), None)
    if at < 0 or script is None:
        return ""
    launcher: list[str] = []
    devices = ""
    index = at + 1
    while index < script:
        name, equals, value = words[index].partition("=")
        if not equals and index + 1 < script and name.startswith("-") and not words[index + 1].startswith("-"):
            value, index = words[index + 1], index + 1
        if name in _WITH_VALUE:
            launcher.append(f"{_WITH_VALUE[name]}={value}")
        elif name in ("--include", "-i") and value.startswith("localhost:") and "@" not in value:
            devices = value.removeprefix("localhost:")
        elif name == "--module":
            launcher.append("--module")
        index += 1
    if devices:
        launcher.append(f"--nproc_per_node={len(devices.split(','))}")
    if not any(word.startswith("--nproc_per_node") for word in launcher):
        launcher.insert(0, "--nproc_per_node=gpu")
    prefix = [*words[:at], *([f"CUDA_VISIBLE_DEVICES={devices}"] if devices else [])]
    return " ".join([*prefix, "torchrun", *launcher, words[script], *_arguments(words[script + 1 :])])


def _arguments(words: list[str]) -> list[str]:
    """The script's arguments without DeepSpeed's."""
    kept: list[str] = []
    skip = False
    for index, word in enumerate(words):
        if skip:
            skip = False
            continue
        name, equals, _ = word.partition("=")
        if name in ("--deepspeed", "--deepspeed_config"):
            following = words[index + 1] if index + 1 < len(words) else "-"
            skip = not equals and not following.startswith("-") and following.endswith(".json")
            continue
        kept.append(word)
    return kept
