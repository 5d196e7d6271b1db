"""The tree's own walks find what LibCST's providers find, over the text of all fixtures."""

from __future__ import annotations

from pathlib import Path

import libcst as cst
import pytest
from libcst import metadata

from ckptkit.migrate.module import Module
from ckptkit.migrate.text import decode

FIXTURES = sorted((Path(__file__).parents[2] / "fixtures" / "scripts").glob("*/before.py"))
ODD = b"""\
import a.b as ab, c
from d import e as f
with open(p) as (g, h[0], i.j): pass
for (k, [l, *m]), n.o in q: k += 1
r: int = (s := 3)
del t, u.v
try: pass
except E as w: pass
class X(Y, metaclass=Z):
    aa = bb
    def method(self, cc=aa, *dd: ee, **ff) -> gg:
        global hh
        hh = [ii for ii in jj if (kk := ii) for ll in mm]
        return lambda nn, oo=pp: nn + qq
"""


def _described(scopes: dict, nodes: list[cst.CSTNode]) -> list[object]:
    """Scopes in words that two walks can be compared by: the chain of kinds, and what each name may be."""
    found = []
    for node in nodes:
        scope = scopes.get(node)
        if scope is None:
            found.append(None)
            continue
        name = node.value if isinstance(node, cst.Name) else "self"
        where = sorted(str(id(getattr(a, "node", None))) for a in scope[name])
        uses = sorted(id(r.node) for a in scope[name] for r in a.references)
        found.append((type(scope).__name__, type(scope.parent).__name__, where, uses))
    return found


@pytest.mark.parametrize("data", [*(path.read_bytes() for path in FIXTURES[::4]), ODD])
def test_scopes_and_holders_are_those_of_libcst(data: bytes) -> None:
    module = Module(Path("x.py"), decode(data))
    wrapper = metadata.MetadataWrapper(module.tree, unsafe_skip_copy=True)
    found = wrapper.resolve_many([metadata.ScopeProvider, metadata.ParentNodeProvider, metadata.PositionProvider])
    nodes = list(found[metadata.PositionProvider])
    assert len(nodes) > 20
    parents = found[metadata.ParentNodeProvider]
    for node in nodes:
        assert module.parent(node) is parents.get(node)
    names = [node for node in nodes if isinstance(node, (cst.Name, cst.FunctionDef, cst.ClassDef))]
    mine = {node: module._scopes.get(node) for node in names}
    assert _described(mine, names) == _described(dict(found[metadata.ScopeProvider]), names)


def test_within_is_by_identity_and_place() -> None:
    module = Module(Path("x.py"), decode(b"def f(a):\n    b = a\n    def g(): return b\n\nc = f\n"))
    outer, inner = module.every(cst.FunctionDef)
    returned = module.every(cst.Return)[0]
    last = module.every(cst.Assign)[-1]
    assert module.within(returned, inner) and module.within(returned, outer) and module.within(outer, outer)
    assert not module.within(outer, inner) and not module.within(last, outer) and not module.within(inner, returned)
    assert module.function(returned) is inner and module.function(inner) is outer and module.function(outer) is None
    stranger = cst.Name("b")
    assert module.within(stranger, stranger) and not module.within(stranger, outer)
