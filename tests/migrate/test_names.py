"""Names are resolved: what only looks like FSDP1 stays as it is, and every way of importing it is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

LOOK_ALIKES = {
    "a class of the program": """
        class FSDP:
            def __init__(self, model): self.module = model
        model = FSDP(object())
        print(model.module, "from torch.distributed.fsdp import FullyShardedDataParallel")
        """,
    "fairscale": """
        from fairscale.nn import FullyShardedDataParallel as FSDP
        model = FSDP(net)
        model.clip_grad_norm_(1.0)
        """,
    "strings and comments": """
        # FSDP(model) from torch.distributed.fsdp.FullyShardedDataParallel
        text = "FSDP(model, auto_wrap_policy=policy)"
        print(f"torch.distributed.fsdp {text}")
        """,
    "fully_shard already": """
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
        for layer in model.layers:
            fully_shard(layer, mp_policy=MixedPrecisionPolicy())
        fully_shard(model)
        assert isinstance(model, FSDPModule)
        state = model.state_dict()
        optimizer = Adam(model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        """,
    "a name that is bound again": """
        from torch.distributed.fsdp import fully_shard
        def FSDP(model):
            return fully_shard(model)
        model = FSDP(model)
        """,
    "methods of other objects": """
        from torch.distributed.fsdp import fully_shard
        with trainer.no_sync():
            trainer.clip_grad_norm_(1.0)
        print(trainer.module, net.forward(x), copy.deepcopy(net))
        """,
    "a parameter called FSDP": """
        import torch.distributed.fsdp
        def build(FSDP, model):
            return FSDP(model, auto_wrap_policy=None)
        """,
}


@pytest.mark.parametrize("code", LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_what_only_looks_like_it_stays(code: str, untouched: Callable) -> None:
    untouched(code)


IMPORTS = {
    "from": ("from torch.distributed.fsdp import FullyShardedDataParallel", "FullyShardedDataParallel"),
    "from as": ("from torch.distributed.fsdp import FullyShardedDataParallel as F1", "F1"),
    "private module": (
        "from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP",
        "FSDP",
    ),
    "module": ("import torch.distributed.fsdp", "torch.distributed.fsdp.FullyShardedDataParallel"),
    "module as": ("import torch.distributed.fsdp as fsdp", "fsdp.FullyShardedDataParallel"),
    "package": ("from torch.distributed import fsdp", "fsdp.FullyShardedDataParallel"),
    "torch": ("import torch", "torch.distributed.fsdp.FullyShardedDataParallel"),
    "alias": ("from torch.distributed.fsdp import FullyShardedDataParallel\nWrap = FullyShardedDataParallel", "Wrap"),
    "in a function": (
        "def load():\n    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n    return FSDP",
        "load()",
    ),
    "guarded": (
        "try:\n    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "except ImportError:\n    raise SystemExit",
        "FSDP",
    ),
    "re-exported": ("from compat import Sharded", "Sharded"),
}


@pytest.mark.parametrize(("line", "name"), IMPORTS.values(), ids=IMPORTS)
def test_every_import_is_found(line: str, name: str, migrated: Callable) -> None:
    compat = "from torch.distributed.fsdp import FullyShardedDataParallel as Sharded\n"
    found = migrated(f"{line}\nmodel = {name}(model)\n", others={"compat.py": compat})
    assert "fully_shard(model)\n" in found.text, found.text
    compile(found.text, "train.py", "exec")


def test_a_star_import_is_reported(migrated: Callable) -> None:
    found = migrated("from torch.distributed.fsdp import *\nmodel = FullyShardedDataParallel(model)\n")
    assert found.grades == ["manual"]
    assert "# TODO(ckptkit): names of a star import cannot be resolved" in found.text
