"""A model that is saved as an object is left to a person: modules that are sharded by fully_shard do not pickle.

What: `torch.save(model, path)`, `pickle.dump(model, f)` and `joblib.dump(model, f)` of a sharded model get a TODO, also
for `model.module`.

Why: pickling a module after `fully_shard` raises PicklingError at the end of the training. FSDP1 and DDP wrote the
whole object, or its module.

Before and after: as it was, with `# TODO(ckptkit): ...` above the call.

What to do: save `get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))`, which
all ranks call, and build the model from its class where it is loaded.

In numbers: nothing changes by itself.

Known limits: objects that hold the model among others (`torch.save(trainer, path)`) are not seen.
"""

from __future__ import annotations

import libcst as cst

from ..draft import Draft
from ..replicas import holding

SOURCES = ("fsdp1", "ddp", "deepspeed")


def rewrite(draft: Draft) -> None:
    """Report models that are pickled as they are."""
    for call in draft.calls(
        "torch.save", "pickle.dump", "pickle.dumps", "joblib.dump", "dill.dump", "cloudpickle.dump"
    ):
        held = call.args[0].value if call.args else None
        if isinstance(held, (cst.Dict, cst.Tuple, cst.List)):
            values = [one.value for one in held.elements]
        else:
            values = [held] if held is not None else []
        for value in values:
            if draft.module.skips(call) or not isinstance(value, (cst.Name, cst.Attribute)):
                continue
            if holding(draft, value, *SOURCES):
                draft.todo(call, "a sharded model does not pickle: save get_model_state_dict of it, on all ranks")
                break
