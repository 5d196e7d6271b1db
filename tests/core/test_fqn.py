"""Names: what wrappers put into them is taken out, and nothing else."""

from __future__ import annotations

import pytest

from ckptkit.core.fqn import clean, common_prefix, join


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("_fsdp_wrapped_module.a.b", "a.b"),
        ("a._fsdp_wrapped_module._checkpoint_wrapped_module.b", "a.b"),
        ("_orig_mod.layers.0._orig_mod.w", "layers.0.w"),
        ("module.a", "module.a"),
        ("my_orig_mod.a", "my_orig_mod.a"),
        ("a._orig_mod", "a._orig_mod"),
    ],
)
def test_clean(wrapped: str, plain: str) -> None:
    assert clean(wrapped) == plain


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (["module.a", "module.b"], "module."),
        (["module.a", "b"], ""),
        (["module.module.a", "module.module.b"], "module.module."),
        (["_forward_module.module.a"], "_forward_module.module."),
        ([], ""),
        (["modules.a"], ""),
    ],
)
def test_a_prefix_goes_only_where_every_name_carries_it(names: list[str], prefix: str) -> None:
    assert common_prefix(names) == prefix


def test_join() -> None:
    assert join("", "a", "", "b") == "a.b"
