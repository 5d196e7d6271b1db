"""The context that puts whole plain parameters in the place of sharded ones, as it is written into a migrated file."""

from __future__ import annotations

from .draft import Draft

HELPER = '''@CONTEXTMANAGER
def gathered(model, modifier_rank=None):
    """Whole plain parameters in a model; what `modifier_rank` made of them goes back into the shards of all ranks."""
    held, wholes = [], {}
    for unit in [m for m in model.modules() if isinstance(m, FSDPMODULE)]:
        unit.reshard()
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if isinstance(param, DTENSOR):
                if param not in wholes:
                    wholes[param] = TORCH.nn.Parameter(param.detach().full_tensor().clone(), param.requires_grad)
                held.append((module, name, param))
                setattr(module, name, wholes[param])
    try:
        yield
    finally:
        for module, name, param in held:
            setattr(module, name, param)
    for param, whole in wholes.items() if modifier_rank is not None else ():
        put_back(param, whole.detach(), modifier_rank)'''

PUT_BACK = '''def put_back(param, whole, rank):
    """Give all ranks their shards of what one rank made of a whole parameter."""
    DIST.broadcast(whole, src=rank)
    with TORCH.no_grad():
        param.copy_(DISTRIBUTE(whole, param.device_mesh, param.placements, src_data_rank=None))'''


def context(draft: Draft) -> str:
    """Have the context manager written into the file; its name."""
    if "gathered" not in draft.helpers:
        put_back(draft)
        text = HELPER.replace("CONTEXTMANAGER", draft.need("contextlib", "contextmanager"))
        text = text.replace("FSDPMODULE", draft.need("torch.distributed.fsdp", "FSDPModule"))
        text = text.replace("DTENSOR", draft.need("torch.distributed.tensor", "DTensor"))
        draft.helpers["gathered"] = text.replace("TORCH", draft.need_module("torch"))
    return "gathered"


def put_back(draft: Draft) -> str:
    """Have the function written into the file that shards what one rank made of a parameter; its name."""
    if "put_back" not in draft.helpers:
        text = PUT_BACK.replace("DISTRIBUTE", draft.need("torch.distributed.tensor", "distribute_tensor"))
        text = text.replace("DIST.", draft.need_module("torch.distributed", "dist") + ".")
        draft.helpers["put_back"] = text.replace("TORCH", draft.need_module("torch"))
    return "put_back"
