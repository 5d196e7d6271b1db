"""Signatures of what is already wrong before the first update: weights, their precision, batches, the forward pass."""

from __future__ import annotations

import math

from .cause import Diagnosis
from .compare import Comparison, tensor_differences
from .updates import only_low_precision, updates


def not_finite(c: Comparison) -> Diagnosis | None:
    for trace, who in ((c.candidate, "candidate"), (c.reference, "reference")):
        step = next((r.step for r in trace.steps if not math.isfinite(r.loss)), None)
        if step is not None:
            return Diagnosis(
                "not finite",
                f"the loss of the {who} is not finite from step {step} on",
                f"{trace.label}: step {step}, loss {trace.losses[step] if step < len(trace.losses) else math.nan}",
                "nothing can be compared after that; if only one side is affected, look at loss scaling and dtypes",
            )
    return None


def masters(c: Comparison) -> Diagnosis | None:
    """Weights or optimizer states kept in fewer bits than the reference keeps."""
    named = [
        d for moment in ("initial", "after_first", "optimizer_first")
        for d in tensor_differences(
            getattr(c.reference, moment), getattr(c.candidate, moment), moment, common_only=True
        )
        if d.kind == "dtype"
    ]  # fmt: skip
    rounded = [
        u.name
        for u in updates(c)
        if not u.is_still and only_low_precision(u.after) and not only_low_precision(u.reference_after)
    ]
    if not named and (not rounded or len(rounded) < len([u for u in updates(c) if not u.reference_is_still])):
        return None
    evidence = (
        named[0].describe()
        if named
        else f"every sampled value of {rounded[0]} has a low-precision mantissa after step 0"
    )
    return Diagnosis(
        "dtype of masters",
        "the optimizer updates weights of another precision than the reference does",
        f"{evidence}; {len(named or rounded)} tensors",
        "keep the sharded parameters in fp32 and compute in bf16 through MixedPrecisionPolicy(param_dtype=...), "
        "instead of casting the model; DeepSpeed bf16 and fp16 keep fp32 masters",
    )


def initial_weights(c: Comparison) -> Diagnosis | None:
    """No rank-0 broadcast leaves rank 0's rows right and the others wrong; otherwise the start itself is another."""
    found = tensor_differences(c.reference.initial, c.candidate.initial, "initial", common_only=True)
    found = [d for d in found if d.relative > c.tolerance.first_rtol]
    if not found:
        return None
    world = max(c.candidate.world_size, 1)
    # Elements that every rank initialises alike (ones, zeros) are right in any case, so only tensors that differ tell.
    rows = [d.name for d in found if _head_is_right(c, d.name, world)]
    if world > 1 and rows and len(rows) >= len(found) / 2:
        return Diagnosis(
            "no rank-0 broadcast",
            "each rank kept its own random weights: the rows of rank 0 are right, those of the other ranks are not",
            f"{len(found)} tensors differ before the first step, first {found[0].name}; in {len(rows)} of them "
            f"the first 1/{world} of the elements is equal",
            "DDP, DeepSpeed and FSDP1 with sync_module_states broadcast rank 0's weights; fully_shard does not. "
            "Broadcast every parameter and buffer from rank 0 before fully_shard, or seed all ranks alike",
        )
    worst = max(found, key=lambda d: d.relative)
    return Diagnosis(
        "other starting weights",
        "the runs start from other weights",
        f"{len(found)} of {len(c.reference.initial)} tensors differ, worst {worst.describe()}",
        "look at the seed, at what runs before the model is built, and at which checkpoint is loaded",
    )


def _head_is_right(c: Comparison, name: str, world: int) -> bool:
    ours, theirs = c.reference.initial[name].sample, c.candidate.initial[name].sample
    head = max(len(ours) // world, 1)
    return len(ours) > head and ours[:head] == theirs[:head] and ours[head:] != theirs[head:]


def rank_weights(c: Comparison) -> Diagnosis | None:
    """In scripts the recorder looked at the ranks' weights when sharding began."""
    if c.candidate.environment.get("ranks_went_apart") != "yes" or c.reference.environment.get("ranks_went_apart"):
        return None
    if not c.deviations or c.deviations[0].step != 0:
        return None
    return Diagnosis(
        "no rank-0 broadcast",
        "the ranks built different weights and nothing made them equal before training",
        f"step {c.deviations[0].step}: {c.deviations[0].what} differs by {c.deviations[0].relative:.2e} relative",
        "broadcast every parameter and buffer from rank 0 before fully_shard, or seed all ranks alike",
    )


def data_order(c: Comparison) -> Diagnosis | None:
    ours, theirs = [r.data for r in c.reference.steps], [r.data for r in c.candidate.steps]
    pairs = [(i, a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a is not None and b is not None]
    other = [i for i, a, b in pairs if a != b]
    if not other or (c.first is not None and c.first.step < other[0]):
        return None
    same_batches = sorted(a for _, a, _ in pairs if a) == sorted(b for _, _, b in pairs if b)
    return Diagnosis(
        "data order",
        "the runs see the same batches in another order" if same_batches else "the runs see other batches",
        f"first at step {other[0]}; {len(other)} of {len(pairs)} batches differ",
        "compare sampler, shuffle seed, set_epoch, drop_last and batch size per rank, and how many random numbers are "
        "drawn before the first batch; after a resume, how many batches are skipped",
    )


def forward_pass(c: Comparison) -> Diagnosis | None:
    """Same weights, same batch, another loss at step 0: the forward pass itself differs."""
    first = c.first
    if first is None or first.what != "loss" or first.step != 0 or not c.reference.initial or not c.candidate.initial:
        return None
    ours, theirs = (t.environment.get("compute_dtype", "fp32") for t in (c.reference, c.candidate))
    if ours != theirs:
        return Diagnosis(
            "forward pass",
            f"the weights are equal at step 0 and are computed with in {theirs}, where the reference takes {ours}",
            f"step 0: {first.reference:.9g} against {first.candidate:.9g}",
            "give every fully_shard call the MixedPrecisionPolicy of its FSDP unit, and keep autocast where it was",
        )
    known_data = all(t.steps and t.steps[0].data is not None for t in (c.reference, c.candidate))
    if not known_data:
        swapped = set(c.reference.losses) & set(c.candidate.losses)
        return Diagnosis(
            "data order",
            "the weights are equal before the first step and its loss is not, so the first batch is another",
            f"step 0: {first.reference:.9g} against {first.candidate:.9g}"
            + (f"; {len(swapped)} losses occur on both sides" if swapped else ""),
            "compare sampler, shuffle seed, set_epoch and drop_last; if the batches are equal, dropout and dtypes",
        )
    return Diagnosis(
        "forward pass",
        "weights and batch are equal at step 0 and the loss is not: the forward pass computes something else",
        f"step 0: {first.reference:.9g} against {first.candidate:.9g}",
        "compare compute dtype (param_dtype, autocast, cast_forward_inputs), buffers, dropout and its seed, "
        "train/eval mode and how the loss is averaged",
    )
