"""What a DeepSpeed configuration says that changes the files: precision, sub-groups, alignment, order of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.options import WriteOptions
from ..errors import UsageError

STAGES = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3}
_SUB_GROUP = 1_000_000_000  # `sub_group_size` of runtime/zero/config.py (0.19.8)
_ADAM = ("adam", "adamw", "fusedadam", "cpuadam")


@dataclass(frozen=True, slots=True)
class Config:
    """`low` is the dtype that the configuration trains in, None where it does not say.

    `fused`: the engine makes DeepSpeed's own Adam, which counts steps in Python integers and wants `bias_correction`.
    `clip` is the gradient clipping, 1.0 where nothing is said (GRADIENT_CLIPPING_DEFAULT of runtime/constants.py).
    """

    stage: int
    ranks: int
    low: str | None = None
    sub_group_size: int = _SUB_GROUP
    aligned: bool = False
    round_robin: bool = False
    fused: bool = False
    offload: bool = False
    clip: float = 1.0
    given: Mapping[str, Any] | None = None

    @property
    def whole(self) -> bool:
        """Whether the optimizer keeps every parameter's state as it is: stage 0 without vectors."""
        return self.stage == 0 and not self.fused


def read_config(options: WriteOptions) -> Config:
    """The configuration behind `--ds-config`, with the stage that the target names.

    Raises UsageError where the target names no stage and the configuration neither, or the two disagree.
    """
    given = options.ds_config or {}
    zero = _section(given, "zero_optimization")
    stage = STAGES.get(options.target, _number(zero.get("stage")))
    if stage is None:
        raise UsageError(
            f"--to {options.target} does not say which stage of ZeRO",
            why="each stage has files of its own",
            hint="--to zero0, zero1, zero2 or zero3; or --ds-config FILE with zero_optimization.stage",
        )
    said = _number(zero.get("stage"))
    if said is not None and said != stage:
        raise UsageError(
            f"the target is {options.target}, the configuration trains with stage {said}",
            why="the stages keep their files in different forms",
            hint=f"--to zero{said}, or another --ds-config",
        )
    offload = bool(_section(zero, "offload_optimizer").get("device", "none") not in ("none", None))
    low = None
    if options.ds_config is not None:
        modes = [
            name
            for key, name in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16"))
            if _section(given, key).get("enabled") is True
        ]
        vague = any(_section(given, key).get("enabled") == "auto" for key in ("bf16", "bfloat16", "fp16"))
        low = modes[0] if modes else None if vague else "float32"
    # BF16_Optimizer takes the place of the ZeRO optimizer here and knows neither order nor alignment
    # (`_do_optimizer_sanity_check`, runtime/engine.py).
    accumulates = _section(given, "data_types").get("grad_accum_dtype")
    plain = stage == 1 and low == "bfloat16" and accumulates in ("fp32", "float32") and not offload
    flat = stage in (1, 2) and not plain
    size = _number(zero.get("sub_group_size"))
    optimizer = _section(given, "optimizer")
    own = str(optimizer.get("type", "")).lower() in _ADAM and not _section(optimizer, "params").get("torch_adam")
    return Config(
        stage=stage,
        ranks=options.ranks,
        low=low,
        sub_group_size=_SUB_GROUP if size is None else size,
        aligned=flat and zero.get("parameter_alignment") is True,
        round_robin=flat and zero.get("round_robin_gradients") is True,
        fused=own,
        offload=offload,
        clip=_float(given.get("gradient_clipping"), 1.0),
        given=options.ds_config,
    )


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> int | None:
    """An integer of a JSON configuration (`1e9` is one); None for "auto" and for nothing."""
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _float(value: Any, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) else otherwise
