"""Migrations broken by hand: edits of a migrated script, each a mistake that people make, and the causes it may get."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass

RANK_SEED = re.compile(r"manual_seed\((dist\.get_rank\(\)|int\(os\.environ\[\"RANK\"\]\))\)")
MADE = re.compile(r"^( *)((?:model|net|engine) = \w+\(\)(?:\.to\(device\))?)\n", re.MULTILINE)
OWNER = r"(?:model|net|engine|fsdp_model)"
OPTIMIZER = re.compile(rf"^ *optimizer = (?:torch\.)?optim\.\w+\({OWNER}\.parameters\(\).*\)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Breakage:
    """`edit` answers the broken text, or the text as it was where there is nothing to break."""

    name: str
    edit: Callable[[str], str]
    causes: tuple[str, ...]


def replaced(pattern: str, by: str, *, where: str = "") -> Callable[[str], str]:
    """Replaces every match, in texts in which `where` is found."""

    def edit(text: str) -> str:
        return re.sub(pattern, by, text, flags=re.MULTILINE) if re.search(where, text) else text

    return edit


def without_broadcast(text: str) -> str:
    """Only where ranks build different weights: elsewhere nothing is lost with the broadcast."""
    if "torch.manual_seed(" in text and not RANK_SEED.search(text):
        return text
    return re.sub(r"dist\w*\.broadcast\(tensor\.detach\(\).*\)", "pass", text)


def without_mixed_precision(text: str) -> str:
    """Not where buffers were cast as well: an fp32 model with bf16 buffers does not run at all."""
    if "mp_policy=" not in text or "buffer.data.to(" in text:
        return text
    return text.replace("param_dtype=torch.bfloat16", "param_dtype=torch.float32")


def optimizer_first(text: str) -> str:
    """The optimizer is made right after the model."""
    made, optimizer = MADE.search(text), OPTIMIZER.search(text)
    if made is None or optimizer is None or not made.end() < optimizer.start():
        return text
    name = made.group(2).split(" ")[0]
    line = re.sub(rf"\({OWNER}\.parameters", f"({name}.parameters", optimizer.group())
    return text[: made.end()] + line + text[made.end() : optimizer.start()] + text[optimizer.end() :]


# What belongs to one construct comes first: a script gets the first that fits it.
SPECIAL = (
    Breakage(
        "only the first micro-batch synchronised",
        replaced(r"set_requires_gradient_sync\(step % 3 == 2\)", "set_requires_gradient_sync(step % 3 == 0)"),
        ("gradient scale", "unknown"),
    ),
    Breakage("no division by the micro-batches", replaced(r"\bloss / \d", "loss"), ("gradient scale",)),
    Breakage("no rank-0 broadcast", without_broadcast, ("no rank-0 broadcast",)),
    Breakage("writeback lost", replaced("writeback=True", "writeback=False"), ("other starting weights",)),
    Breakage(
        "checkpoint not loaded",
        replaced(r"^( +)net\.load_state_dict\(.*\)", r"\1pass"),
        ("no rank-0 broadcast", "other starting weights"),
    ),
    Breakage("other initial values", replaced(r"else 0\.01\)", "else 0.02)"), ("other starting weights",)),
    Breakage(
        "the loss is not scaled and the gradient is unscaled",
        replaced(r"scaler\.scale\(loss\)\.backward\(\)", "scaler.scale(loss); loss.backward()"),
        ("gradient scale",),
    ),
    Breakage(
        "norm not clipped",
        replaced(r"^( +)torch\.nn\.utils\.clip_grad_norm_\((?:(?!20\.0).)*\)$", r"\1pass"),
        ("clipping missing",),
    ),
    Breakage(
        "mixed precision dropped",
        without_mixed_precision,
        ("forward pass",),
    ),
    Breakage(
        "optimizer state not restored",
        replaced(r"^( +)set_optimizer_state_dict\(", r"\1(lambda *a, **k: None)("),
        ("unknown",),
    ),
    Breakage(
        "weights not restored",
        replaced(r"^( +)set_model_state_dict\(", r"\1(lambda *a, **k: None)(", where=r"build\(1\)"),
        ("unknown",),
    ),
    Breakage(
        "decay of one group lost", replaced(r'"weight_decay": 0\.1', '"weight_decay": 0.0'), ("group hyper-parameters",)
    ),
    Breakage(
        "schedule stands still",
        replaced(r"^( +)scheduler\.step\(\)", r"\1pass"),
        ("learning-rate schedule", "learning rate"),
    ),
    Breakage(
        "frozen part trains",
        replaced(r"p\.requires_grad_\(False\)", "p.requires_grad_(True)"),
        ("other trained parameters",),
    ),
)
# These fit most scripts, which share them out by their names.
GENERAL = (
    Breakage("optimizer before sharding", optimizer_first, ("optimizer created before sharding",)),
    Breakage("another learning rate", replaced(r"\blr=([0-9][0-9.e-]*)", r"lr=2 * \1"), ("learning rate",)),
    Breakage("another rate", replaced(r"learning_rate=([0-9][0-9.e-]*)", r"learning_rate=2 * \1"), ("learning rate",)),
    Breakage("momentum lost", replaced(r", momentum=0\.9", ""), ("group hyper-parameters",)),
    Breakage(
        "loss of two batches", replaced(r"(?<!\))\bloss\.backward\(\)", "(loss * 2).backward()"), ("gradient scale",)
    ),
    Breakage("other batches", replaced(r"manual_seed\(1 \+", "manual_seed(2 +"), ("data order",)),
)


def breakage_for(name: str, text: str) -> tuple[Breakage, str] | None:
    """The breakage of the script called `name`, and the broken text; None where none fits."""
    turn = zlib.crc32(name.encode()) % len(GENERAL)
    for breakage in (*SPECIAL, *GENERAL[turn:], *GENERAL[:turn]):
        broken = breakage.edit(text)
        if broken != text:
            return breakage, broken
    return None
