"""Signatures of a wrong first update: frozen weights, another rate, a gradient scaled, clipped or decayed otherwise."""

from __future__ import annotations

import math

from .cause import Diagnosis, listed, numbers
from .compare import Comparison, relative
from .updates import common_ratio, first_gradient_is_right, updates

# What changes an update; "foreach" or "fused" only changes how it is computed.
OPTIONS = ("lr", "weight_decay", "momentum", "dampening", "nesterov", "betas", "eps", "amsgrad", "maximize")
SCALE_REMEDY = (
    "compare who divides by the world size and by the number of accumulated micro-batches: engine.backward divides "
    "by gradient_accumulation_steps, loss.backward does not; DDP and FSDP average over ranks, an all-reduce sums"
)
GROUP_REMEDY = (
    "compare the options of each parameter group; a group's own lr, weight_decay and betas must go with its parameters"
)


def frozen(c: Comparison) -> Diagnosis | None:
    moving = [u for u in updates(c) if not u.reference_is_still]
    still = [u for u in moving if u.is_still]
    if moving and len(still) == len(moving):
        return Diagnosis(
            "optimizer created before sharding",
            "no weight moves: the optimizer holds tensors that the model no longer uses",
            f"none of {len(moving)} tensors changed in step 0; losses {numbers(c.candidate.losses[:3])} "
            f"against {numbers(c.reference.losses[:3])}",
            "create the optimizer (and the scheduler) after fully_shard or FSDP has replaced the parameters",
        )
    return None


def partly_frozen(c: Comparison) -> Diagnosis | None:
    seen = updates(c)
    still = [u.name for u in seen if u.is_still and not u.reference_is_still]
    moved = [u.name for u in seen if not u.is_still and u.reference_is_still]
    if not still and not moved:
        return None
    names, says = (still, "do not move") if still else (moved, "move that the reference leaves alone")
    return Diagnosis(
        "other trained parameters",
        f"{len(names)} tensors {says}",
        f"in step 0: {listed(names)}",
        "compare requires_grad and the lists of parameters that the optimizer gets; parameters without a gradient must "
        "get None and not zeros (momentum and weight decay move them)",
    )


def schedule(c: Comparison) -> Diagnosis | None:
    rate = next((d for d in c.deviations if d.what == "lr"), None)
    if rate is None or (c.first is not None and c.first.step < rate.step):
        return None
    ours, theirs = [r.lrs for r in c.reference.steps], [r.lrs for r in c.candidate.steps]
    shift = next((k for k in (1, 2, -1, -2) if _shifted(ours, theirs, k)), None)
    if shift is not None:
        return Diagnosis(
            "learning-rate schedule",
            f"the schedule is {abs(shift)} step{'s' if abs(shift) > 1 else ''} {'late' if shift > 0 else 'early'}",
            f"step {rate.step}: {rate.candidate:g} against {rate.reference:g}",
            "compare last_epoch, when scheduler.step() is called, and whether the scheduler's state was restored",
        )
    several = max(map(len, ours), default=0) > 1
    return Diagnosis(
        "group hyper-parameters" if several else "learning rate",
        "a parameter group has another learning rate" if several else "the learning rate is another",
        f"step {rate.step}: {rate.candidate:g} against {rate.reference:g}",
        GROUP_REMEDY,
    )


def _shifted(ours: list[tuple[float, ...]], theirs: list[tuple[float, ...]], k: int) -> bool:
    late, early = (theirs, ours) if k > 0 else (ours, theirs)
    n = min(len(ours), len(theirs)) - abs(k)
    return n >= 2 and len(set(early[:n])) > 1 and late[abs(k) : abs(k) + n] == early[:n]


def loss_scale(c: Comparison) -> Diagnosis | None:
    """In scripts the recorded loss is what was backpropagated, so a wrong divisor shows in loss and gradient alike."""
    if not c.reference.steps or not c.candidate.steps:
        return None
    ours, theirs = c.reference.steps[0], c.candidate.steps[0]
    if not ours.loss or not ours.grad_norm or not theirs.grad_norm:
        return None
    ratio = theirs.loss / ours.loss
    if _near_whole(ratio) is None or relative(ratio, theirs.grad_norm / ours.grad_norm) > 1e-2:
        return None
    return Diagnosis(
        "gradient scale",
        f"the backpropagated loss and the first gradient are {_times(ratio)} what they should be",
        f"step 0: loss ratio {ratio:.6g}, gradient norm ratio {theirs.grad_norm / ours.grad_norm:.6g}",
        SCALE_REMEDY,
    )


def gradient_scale(c: Comparison) -> Diagnosis | None:
    """The first gradient is the right one times a constant: all tensors share the ratio, and so does the raw norm."""
    if not c.reference.steps or not c.candidate.steps:
        return None
    ours, theirs = c.reference.steps[0].grad_norm, c.candidate.steps[0].grad_norm
    by_norm = theirs / ours if ours and theirs else None
    by_update = common_ratio(updates(c))
    if by_norm is None:
        # Without the raw norm a constant ratio is a wrong divisor if it is a whole number, else a clip.
        if by_update is None or _near_whole(by_update) is None:
            return None
        ratio = by_update
    elif relative(1.0, by_norm) <= 1e-3:
        return None
    else:
        ratio = by_norm
    if _near_whole(ratio) is None and (by_update is None or relative(ratio, by_update) > 1e-2):
        return None
    what = "gradient norm" if by_norm is not None else "update"
    also = by_norm is not None and by_update is not None and relative(1.0, by_update) > 1e-2
    return Diagnosis(
        "gradient scale",
        f"the first gradient is {_times(ratio)} what it should be",
        f"step 0: {what} ratio {ratio:.6g}"
        + (f", updates of all tensors have the ratio {by_update:.6g}" if also else ""),
        SCALE_REMEDY,
    )


def _times(ratio: float) -> str:
    whole = _near_whole(ratio)
    if whole is None:
        return f"{ratio:.4g} times"
    return f"{whole} times" if ratio > 1 else f"1/{whole} of"


def _near_whole(ratio: float) -> int | None:
    """k if the ratio is k or 1/k for a whole k > 1, within 0.5 %."""
    if not math.isfinite(ratio) or ratio <= 0:
        return None
    big = ratio if ratio > 1 else 1 / ratio
    whole = round(big)
    return whole if whole > 1 and abs(big - whole) <= 5e-3 * whole else None


def clipping(c: Comparison) -> Diagnosis | None:
    """The raw gradient is right and what the optimizer applies is not."""
    for ours, theirs in zip(c.reference.steps, c.candidate.steps, strict=False):
        raw = (ours.grad_norm, theirs.grad_norm)
        if raw[0] is not None and raw[1] is not None and relative(raw[0], raw[1]) > 1e-2:
            return None
        if ours.applied_norm and theirs.applied_norm is not None:
            if relative(ours.applied_norm, theirs.applied_norm) > 1e-2:
                ratio = theirs.applied_norm / ours.applied_norm
                return _clip_verdict(
                    ours.step, ratio, f": norm {theirs.applied_norm:.6g} against {ours.applied_norm:.6g}"
                )
        elif ours.step == 0:
            shared = common_ratio(updates(c))
            if shared is not None and relative(1.0, shared) > 1e-2 and not _other_options(c):
                return _clip_verdict(0, shared, f"; raw norm {raw[0]:.6g}" if raw[0] else "")
    return None


def _clip_verdict(step: int, ratio: float, more: str) -> Diagnosis:
    evidence = (
        f"step {step}: the raw gradients agree as far as known, the applied ones have the ratio {ratio:.6g}{more}"
    )
    if ratio > 1:
        return Diagnosis(
            "clipping missing",
            "the gradient is not clipped where the reference clips it",
            evidence,
            "call torch.nn.utils.clip_grad_norm_ after the last backward and before step()",
        )
    return Diagnosis(
        "clipping extra",
        "the gradient is clipped where the reference does not, or at a smaller norm",
        evidence,
        "DeepSpeed clips at 1.0 when gradient_clipping is absent; look for a second clip and for max_norm",
    )


def group_options(c: Comparison) -> Diagnosis | None:
    """Other options of a parameter group: named where the groups were recorded, else seen in which tensors part."""
    other = _other_options(c)
    if other:
        name, key = other[0]
        several = len({repr(sorted(group.items(), key=str)) for group in c.reference.groups.values()}) > 1
        theirs, ours = c.candidate.groups[name][key], c.reference.groups[name][key]
        return Diagnosis(
            "group hyper-parameters",
            f"{key} of {'the group of ' if several else ''}{name} is {theirs} and should be {ours}",
            f"{len({name for name, _ in other})} of {len(c.reference.groups)} parameters are concerned",
            GROUP_REMEDY,
        )
    moving = [u for u in updates(c) if not u.reference_is_still]
    off = [u for u in moving if u.is_off]
    decay = bool(off) and all(u.differs_along_weights for u in off)
    if not off or not first_gradient_is_right(c) or (len(off) == len(moving) and not decay):
        return None
    ratio = None if decay else common_ratio(off)
    how = (
        "; the updates differ by a multiple of the weights" if decay else f", update ratio {ratio:.6g}" if ratio else ""
    )
    return Diagnosis(
        "group hyper-parameters",
        f"{'weight decay is another' if decay else 'hyper-parameters are others'}: {len(off)} tensors get another "
        f"first update, {len(moving) - len(off)} get the right one",
        f"step 0: {listed([u.name for u in off])}{how}",
        GROUP_REMEDY,
    )


def _other_options(c: Comparison) -> list[tuple[str, str]]:
    """(parameter, option) for every option that both sides recorded and that differs."""
    return [
        (name, key)
        for name, group in c.reference.groups.items()
        for key, value in group.items()
        if key in OPTIONS
        and key in c.candidate.groups.get(name, {})
        and not _same_option(value, c.candidate.groups[name][key])
    ]


def _same_option(a: object, b: object) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-6)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_same_option, a, b))
    return a == b
