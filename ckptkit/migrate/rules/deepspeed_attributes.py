"""Attributes and questions of a DeepSpeed engine become what they stood for.

What: `engine.global_steps` and `micro_steps` become counters, `get_lr()` reads the optimizer's groups,
`get_global_grad_norm()` the norm of the last clipping, `is_gradient_accumulation_boundary()` the test of the counter,
`optimizer` and `lr_scheduler` the objects, `device`, `local_rank`, `global_rank`, `world_size` the process's own;
questions about the config become its values.

Before::

    if engine.is_gradient_accumulation_boundary():
        print(engine.global_steps, engine.get_lr())

After::

    if (micro_steps + 1) % 4 == 0:
        print(global_steps, [group["lr"] for group in optimizer.param_groups])

In numbers: equal.

Known limits: other attributes of the engine are left: a sharded model does not have them.
"""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst

from ..draft import Draft
from ..ds_setup import Setup, local_device, setup_at
from ..grade import Grade
from ..plan import Line
from ..syntax import is_store

SOURCES = ("deepspeed",)

Spelling = Callable[[Draft, Setup, str], Line | None]


def _lr(draft: Draft, setup: Setup, code: str) -> Line:
    return (f'[group["lr"] for group in {setup.at(code, "optimizer")}.param_groups]',)


def _boundary(draft: Draft, setup: Setup, code: str) -> Line:
    if not setup.accumulates:
        return ("True",)
    steps = setup.value(code, "accumulation_steps", setup.accumulation)
    return (f"(({setup.at(code, 'micro_steps')} + 1) % ", *steps, " == 0)")


def _accumulation(draft: Draft, setup: Setup, code: str) -> Line:
    line = setup.value(code, "accumulation_steps", setup.accumulation)
    return line if len(line) == 1 else ("(", *line, ")")


def _micro(draft: Draft, setup: Setup, code: str) -> Line | None:
    micro = setup.micro
    return None if micro is None or not all(isinstance(piece, str) for piece in micro) else ("(", *micro, ")")


def _batch(draft: Draft, setup: Setup, code: str) -> Line | None:
    micro = _micro(draft, setup, code)
    if micro is None:
        return None
    dist = draft.need_module("torch.distributed", "dist")
    return ("(", *micro, " * ", *_accumulation(draft, setup, code), f" * {dist}.get_world_size())")


def _clip(draft: Draft, setup: Setup, code: str) -> Line:
    return ("0.0",) if setup.clip is None else setup.value(code, "max_norm", setup.clip)


def _env(name: str) -> Spelling:
    def spell(draft: Draft, setup: Setup, code: str) -> Line:
        return (f'int({draft.need_module("os")}.environ["{name}"])',)

    return spell


def _dist(call: str) -> Spelling:
    def spell(draft: Draft, setup: Setup, code: str) -> Line:
        return (f"{draft.need_module('torch.distributed', 'dist')}.{call}()",)

    return spell


def _named(name: str) -> Spelling:
    def spell(draft: Draft, setup: Setup, code: str) -> Line | None:
        if name == "lr_scheduler" and not setup.scheduler:
            return ("None",)
        if name == "micro_steps" and not setup.accumulates:
            return None
        return (setup.at(code, name),)

    return spell


_ATTRIBUTES: dict[str, Spelling] = {
    "global_steps": _named("global_steps"),
    "micro_steps": _named("micro_steps"),
    "optimizer": _named("optimizer"),
    "lr_scheduler": _named("lr_scheduler"),
    "device": lambda draft, setup, code: (f"{local_device(draft)}()",),
    "local_rank": _env("LOCAL_RANK"),
    "global_rank": _dist("get_rank"),
    "world_size": _dist("get_world_size"),
    "dp_world_size": _dist("get_world_size"),
    "skipped_steps": lambda draft, setup, code: (
        (f"{setup.at(code, 'scaler')}.skipped",) if setup.precision == "fp16" else ("0",)
    ),
    "cur_scale": lambda draft, setup, code: (
        (f"{setup.at(code, 'scaler')}.cur_scale",) if setup.precision == "fp16" else ("1.0",)
    ),
}
_METHODS: dict[str, Spelling] = {
    "get_lr": _lr,
    "get_global_grad_norm": _named("grad_norm"),
    "is_gradient_accumulation_boundary": _boundary,
    "gradient_accumulation_steps": _accumulation,
    "train_micro_batch_size_per_gpu": _micro,
    "train_batch_size": _batch,
    "gradient_clipping": _clip,
    "zero_optimization_stage": lambda draft, setup, code: (str(setup.stage),),
    "bfloat16_enabled": lambda draft, setup, code: (str(setup.precision == "bf16"),),
    "fp16_enabled": lambda draft, setup, code: (str(setup.precision == "fp16"),),
}
_LEFT = frozenset(
    "train_batch eval_batch monitor allreduce_gradients set_train_batch_size set_gradient_accumulation_boundary "
    "get_mom tput_timer timers global_samples loss_scale destroy reset_activation_shape "
    "empty_partition_cache eigenvalue deepspeed_io training_dataloader config _config save_fp16_model "
    "_zero3_consolidated_16bit_state_dict zero_optimization_partition_weights get_sequence_parallel_group".split()
)


def rewrite(draft: Draft) -> None:
    """Rewrite every attribute and question of an engine."""
    module = draft.module
    for node in module.every(cst.Attribute):
        name = node.attr.value
        if name not in _ATTRIBUTES and name not in _METHODS and name not in _LEFT:
            continue
        if is_store(module, node) or module.skips(node) or not draft.wraps_of(node.value, *SOURCES):
            continue
        setup = setup_at(draft, node.value)
        parent = module.parent(node)
        called = isinstance(parent, cst.Call) and parent.func is node
        spell = _METHODS.get(name) if called else _ATTRIBUTES.get(name)
        line = None
        if setup is not None and spell is not None and not (called and parent.args):  # type: ignore[union-attr]
            line = spell(draft, setup, draft.code(node.value).removesuffix(".module"))
        if line is None:
            if name == "config" and not called:
                continue  # a model's own, as transformers' have
            draft.todo(node, f"a sharded model has no {name}: the engine's meant the run as a whole")
            continue
        draft.replace(parent if called and parent is not None else node, *line)
        draft.note(node, Grade.EXACT, f"the engine's {name} is spelled out")
