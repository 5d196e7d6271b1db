"""The context manager `full_params` that is written into a file whose program works on whole parameters."""

from __future__ import annotations

from .draft import Draft

HELPER = '''@CONTEXTMANAGER
def full_params(model, recurse=True, writeback=True, with_grads=False):
    """Put whole plain parameters in the place of the sharded ones; changes to them are written back."""
    units = [m for m in model.modules() if isinstance(m, FSDPMODULE)]
    inner = {m for unit in units if unit is not model for m in unit.modules()} if not recurse else set()
    held = []
    wholes = {}
    for unit in units:
        unit.reshard()
    for module in model.modules():
        for name, param in [] if module in inner else list(module.named_parameters(recurse=False)):
            if isinstance(param, DTENSOR):
                if param not in wholes:
                    whole = TORCH.nn.Parameter(param.detach().full_tensor().clone(), param.requires_grad)
                    if with_grads and param.grad is not None:
                        whole.grad = param.grad.full_tensor()
                    wholes[param] = whole
                held.append((module, name, param))
                setattr(module, name, wholes[param])
    try:
        yield
    finally:
        for module, name, param in held:
            setattr(module, name, param)
        for param, whole in wholes.items():
            if writeback:
                with TORCH.no_grad():
                    mine = DISTRIBUTE(whole.detach(), param.device_mesh, param.placements, src_data_rank=None)
                    param.copy_(mine)'''


def helper(draft: Draft) -> str:
    """Have the context manager written into the file; its name."""
    if "full_params" not in draft.helpers:
        text = HELPER.replace("CONTEXTMANAGER", draft.need("contextlib", "contextmanager"))
        text = text.replace("FSDPMODULE", draft.need("torch.distributed.fsdp", "FSDPModule"))
        text = text.replace("DTENSOR", draft.need("torch.distributed.tensor", "DTensor"))
        text = text.replace("DISTRIBUTE", draft.need("torch.distributed.tensor", "distribute_tensor"))
        draft.helpers["full_params"] = text.replace("TORCH", draft.need_module("torch"))
    return "full_params"
