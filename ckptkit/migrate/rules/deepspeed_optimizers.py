"""FusedAdam and DeepSpeedCPUAdam become torch.optim.AdamW with DeepSpeed's defaults written out.

What: optimizers of deepspeed.ops.adam that a program makes itself.

Why: they are AdamW (`adam_w_mode=True`) with weight_decay 0, and work on flat buffers of DeepSpeed's; torch's AdamW
decays by 0.01 when it is not told.

Before::

    optimizer = FusedAdam(model.parameters(), lr=1e-3)

After::

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)

In numbers: equal up to the last bits; the kernels round otherwise (1e-7 relative).

Known limits: `bias_correction=False` and the optimizers of deepspeed.ops.lamb, .lion and .adagrad are left over.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..syntax import argument_of

SOURCES = ("deepspeed",)

# Positional order of deepspeed 0.19.8 ops/adam/fused_adam.py and cpu_adam.py.
_FUSED = ["params", "lr", "bias_correction", "betas", "eps", "adam_w_mode", "weight_decay", "amsgrad", "set_grad_none"]
_CPU = ["model_params", "lr", "bias_correction", "betas", "eps", "weight_decay", "amsgrad", "adamw_mode"]
_CLASSES = {"FusedAdam": _FUSED, "DeepSpeedCPUAdam": _CPU}


def rewrite(draft: Draft) -> None:
    """Rewrite the calls, unless an engine stays."""
    if any(w.plan.refused for w in draft.all_wraps if w.source == "deepspeed"):
        return
    for call in draft.module.every(cst.Call):
        name = draft.flow.called(draft.module, call)
        names = _CLASSES.get(name.rpartition(".")[2]) if name.startswith("deepspeed.ops.") else None
        if names is None or draft.module.skips(call) or any(a.star for a in call.args):
            continue
        mode = argument_of(call, names, "adam_w_mode") or argument_of(call, names, "adamw_mode")
        bias = argument_of(call, names, "bias_correction")
        if (mode is not None and draft.code(mode) not in ("True", "False")) or (
            bias is not None and draft.code(bias) != "True"
        ):
            continue
        torch = draft.need_module("torch")
        kind = "Adam" if mode is not None and draft.code(mode) == "False" else "AdamW"
        parameters = argument_of(call, names, names[0])
        pieces: list = [f"{torch}.optim.{kind}(", *(draft.module.quote(parameters) if parameters is not None else ())]
        for key in ("lr", "betas", "eps", "weight_decay", "amsgrad"):
            given = argument_of(call, names, key)
            if given is not None:
                pieces += [f", {key}=", *draft.module.quote(given)]
            elif key == "weight_decay":
                pieces.append(", weight_decay=0.0")
        draft.replace(call, *pieces, ")")
        draft.note(call, Grade.EXACT, f"{name.rpartition('.')[2]} is {kind} with weight_decay 0 unless it is given")
