"""Where values come from: a demand-driven walk from an expression back to the calls and literals that made its value.

It is a may-analysis over the whole program: through assignments, attributes of `self`, parameters and their callers,
returns, tuples, conditionals and imports of sibling modules. Within one function the assignments that reach a use are
told apart by position (the nearest one that surely ran hides earlier ones). What cannot be followed has no origin.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import libcst as cst
from libcst import metadata
from libcst.helpers import get_full_name_for_node

from .containers import items, subscript, unpacked, yielded
from .fixpoint import Fixpoint
from .module import Module
from .names import PASS_CALLS, PASS_METHODS, canonical
from .origin import CALL, CLASS, FUNCTION, INSTANCE, LITERAL, LITERALS, NAME, NOTHING, Origin, Origins
from .program import Program
from .record_fields import given
from .syntax import argument_of, assigned_names, effect, is_store, returns, surely_ran


@dataclass(slots=True)
class Flow:
    """Answers `origins` for any expression of a program."""

    program: Program
    defaults: set[int] = field(
        default_factory=set
    )  # ids of origin nodes that are defaults: other code may override them
    _answers: Fixpoint = field(default_factory=Fixpoint)
    _subclasses: dict[int, set[int]] = field(default_factory=dict)
    _callers: dict[int, list[tuple[Module, cst.Call]]] = field(default_factory=dict)
    _calls_by_name: dict[str, list[tuple[Module, cst.Call]]] = field(default_factory=dict)
    _indexed: int = 0
    _stores: dict[str, list[tuple[Module, cst.Attribute]]] = field(default_factory=dict)
    _stores_of: int = 0

    # -- questions -----------------------------------------------------------------------------------------------

    def origins(self, module: Module, node: cst.CSTNode) -> Origins:
        """All places where the value of an expression may have been made."""
        return self._answers.answer(id(node), lambda: self._expression(module, node))

    def is_fixed(self, module: Module, node: cst.CSTNode) -> bool:
        """Whether an expression has only the origins that are seen: none is a default of a parameter or a field."""
        return not any(id(origin.node) in self.defaults for origin in self.origins(module, node))

    def names(self, module: Module, node: cst.CSTNode) -> set[str]:
        """Dotted names of the APIs that an expression may refer to (not: call)."""
        return {origin.name for origin in self.origins(module, node) if origin.kind == NAME}

    def name(self, module: Module, node: cst.CSTNode) -> str:
        """The one API that an expression refers to, or an empty string."""
        origins = self.origins(module, node)
        names = {origin.name if origin.kind == NAME else "" for origin in origins}
        return names.pop() if len(names) == 1 else ""

    def called(self, module: Module, call: cst.Call) -> str:
        """The one API that a call calls, or an empty string."""
        return self.name(module, call.func)

    def callers(self, module: Module, function: cst.FunctionDef) -> list[tuple[Module, cst.Call]]:
        """All calls of a function (of a class, for `__init__`) in the program."""
        key = id(function)
        if key in self._callers:
            return self._callers[key]
        owner = self.owner(module, function)
        wanted = function.name.value
        if owner is not None and wanted == "__init__":
            wanted = owner.name.value
        target: cst.CSTNode = owner if owner is not None and function.name.value == "__init__" else function
        found: list[tuple[Module, cst.Call]] = []

        def collect() -> None:
            for where, call in self.calls_named(wanted):
                if any(o.node is target for o in self.origins(where, call.func)):
                    found.append((where, call))

        if self._answers.settled(collect):
            self._callers[key] = found
        return found

    def owner(self, module: Module, function: cst.CSTNode) -> cst.ClassDef | None:
        """The class whose method a function is."""
        holder = module.up(function, cst.FunctionDef, cst.ClassDef, cst.Lambda)
        return holder if isinstance(holder, cst.ClassDef) else None

    # -- expressions ---------------------------------------------------------------------------------------------

    def _expression(self, module: Module, node: cst.CSTNode) -> Origins:
        if isinstance(node, cst.Name):
            if node.value in ("None", "True", "False"):
                return frozenset((Origin(module, node, LITERAL, node.value),))
            return self._name(module, node)
        if isinstance(node, cst.Attribute):
            return self._attribute(module, node)
        if isinstance(node, cst.Call):
            return self._call(module, node)
        if isinstance(node, cst.IfExp):
            return self.origins(module, node.body) | self.origins(module, node.orelse)
        if isinstance(node, cst.BooleanOperation):
            return self.origins(module, node.left) | self.origins(module, node.right)
        if isinstance(node, cst.NamedExpr):
            return self.origins(module, node.value)
        if isinstance(node, cst.Await):
            return self.origins(module, node.expression)
        if isinstance(node, cst.Subscript):
            return subscript(self, module, node)
        if isinstance(node, LITERALS):
            return frozenset((Origin(module, node, LITERAL),))
        if isinstance(node, cst.FunctionDef):
            return frozenset((Origin(module, node, FUNCTION, node.name.value),))
        if isinstance(node, cst.ClassDef):
            return frozenset((Origin(module, node, CLASS, node.name.value),))
        return NOTHING

    def _name(self, module: Module, node: cst.Name) -> Origins:
        scope = module.scope(node)
        if scope is None:
            return NOTHING
        assignments = [a for a in scope[node.value] if isinstance(a, metadata.BaseAssignment)]
        if assignments and all(isinstance(a, metadata.BuiltinAssignment) for a in assignments):
            return frozenset((Origin(module, node, NAME, f"builtins.{node.value}"),))
        if not assignments:
            return self._starred(module, node.value)
        found: Origins = NOTHING
        for assignment in self._reaching(module, node, assignments):
            found |= self._assignment(module, assignment, node.value)
        return found

    def _starred(self, module: Module, name: str) -> Origins:
        """Origins of a name that only a star import of a module of the program can have bound."""
        found: Origins = NOTHING
        for statement in module.every(cst.ImportFrom):
            if isinstance(statement.names, cst.ImportStar):
                base = get_full_name_for_node(statement.module) if statement.module else ""
                source = self.program.find(base or "", module, len(statement.relative))
                if source is not None and source is not module:
                    found |= self.exported(source, name)
        return found

    def _reaching(
        self, module: Module, use: cst.CSTNode, assignments: Iterable[metadata.BaseAssignment]
    ) -> list[metadata.BaseAssignment]:
        local: list[tuple[metadata.BaseAssignment, cst.CSTNode]] = []
        rest: list[tuple[metadata.BaseAssignment, cst.CSTNode]] = []
        function = module.function(use)
        for assignment in assignments:
            node = getattr(assignment, "node", None)
            if node is None:
                continue  # a builtin
            same = isinstance(node, cst.CSTNode) and module.function(node) is function
            is_parameter = isinstance(node, cst.Param)
            (local if same and not is_parameter else rest).append((assignment, node))
        use_at = module.span(use).start
        loops = module.loops(use)
        ordered = sorted(((effect(module, node), a, node) for a, node in local), key=lambda one: -one[0])
        found: list[metadata.BaseAssignment] = []
        for holds_from, assignment, node in ordered:
            if holds_from > use_at:
                if any(module.within(node, loop) for loop in loops):
                    found.append(assignment)
                continue
            found.append(assignment)
            if surely_ran(module, node, use):
                return found
        return [*found, *(a for a, _ in rest)]

    def _assignment(self, module: Module, assignment: metadata.BaseAssignment, name: str) -> Origins:
        if isinstance(assignment, metadata.ImportAssignment):
            statement = assignment.node
            if not isinstance(statement, (cst.Import, cst.ImportFrom)):
                return NOTHING
            full, source = self.program.imported(statement, name, module)
            if source is None:
                return frozenset((Origin(module, statement, NAME, canonical(full)),))
            if not full:
                return frozenset((Origin(source, source.tree, NAME, "<module>"),))
            return self.exported(source, full)
        node = getattr(assignment, "node", None)
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            return self.origins(module, node)
        return self._target(module, node) if isinstance(node, cst.CSTNode) else NOTHING

    def exported(self, module: Module, name: str) -> Origins:
        """Origins of a module-level name of a module of the program."""
        return self._answers.answer((id(module), name), lambda: self._global(module, name))  # modules import in circles

    def _global(self, module: Module, name: str) -> Origins:
        scope = module.scope(module.tree.body[0]) if module.tree.body else None
        if scope is None:
            return NOTHING
        found: Origins = NOTHING
        for assignment in scope.globals[name]:
            if not isinstance(assignment, metadata.BuiltinAssignment):
                found |= self._assignment(module, assignment, name)
        return found or self._starred(module, name)

    def _target(self, module: Module, target: cst.CSTNode) -> Origins:
        """Origins of what is stored in a target (a name, an attribute), or given for a parameter."""
        if isinstance(target, cst.Param):
            return self._parameter(module, target)
        path: list[int] = []
        at: cst.CSTNode = target
        for holder in module.ancestors(target):
            if isinstance(holder, cst.Element) and isinstance(module.parent(holder), (cst.Tuple, cst.List)):
                elements = module.parent(holder).elements  # type: ignore[union-attr]
                path.insert(0, next(i for i, e in enumerate(elements) if e is holder))
            elif isinstance(holder, cst.AssignTarget):
                statement = module.parent(holder)
                value = statement.value  # type: ignore[union-attr]
                return unpacked(self, module, value, path)
            elif isinstance(holder, (cst.AnnAssign, cst.NamedExpr)):
                return unpacked(self, module, holder.value, path) if holder.value is not None else NOTHING
            elif isinstance(holder, cst.AsName):
                item = module.parent(holder)
                if not isinstance(item, cst.WithItem):
                    return NOTHING
                return self.origins(module, item.item) | yielded(self, module, item.item)
            elif isinstance(holder, (cst.CompFor, cst.For)):
                return items(self, module, holder.iter) if holder.target is at and not path else NOTHING
            elif isinstance(holder, cst.BaseStatement):
                return NOTHING
            at = holder
        return NOTHING

    def _parameter(self, module: Module, param: cst.Param) -> Origins:
        function = module.function(param)
        if not isinstance(function, cst.FunctionDef):
            return NOTHING
        owner = self.owner(module, function)
        params = [*function.params.posonly_params, *function.params.params]
        static = any(get_full_name_for_node(d.decorator) == "staticmethod" for d in function.decorators)
        bound = owner is not None and not static
        if bound and params and params[0] is param:
            return frozenset((Origin(module, owner, INSTANCE, owner.name.value),)) if owner else NOTHING
        found: Origins = NOTHING
        if param.default is not None:
            found = self.origins(module, param.default)
            self.defaults |= {id(origin.node) for origin in found}
        for where, call in self.callers(module, function):
            argument = argument_of(call, [p.name.value for p in params[1 if bound else 0 :]], param.name.value)
            if argument is not None:
                found |= self.origins(where, argument)
        return found

    # -- attributes and calls ------------------------------------------------------------------------------------

    def _attribute(self, module: Module, node: cst.Attribute) -> Origins:
        name = node.attr.value
        found: Origins = NOTHING
        base = self.origins(module, node.value)
        for origin in base:
            if origin.kind == NAME and origin.name == "<module>":
                found |= self.exported(origin.module, name)
            elif origin.kind == NAME:
                full = f"{origin.name}.{name}"
                inside = self.program.find(full, module) or self.program.find(origin.name, module)
                if inside is not None and not full.startswith(("torch.", "deepspeed.")):
                    if self.program.find(full, module) is inside:
                        found |= {Origin(inside, inside.tree, NAME, "<module>")}
                    else:
                        found |= self.exported(inside, name)
                else:
                    found |= {Origin(module, node, NAME, canonical(full))}
            elif origin.kind in (INSTANCE, CLASS) and isinstance(origin.node, cst.ClassDef):
                found |= self.member(origin.module, origin.node, name)
            elif origin.kind == CALL and name in ("module", "_fsdp_wrapped_module", "_orig_mod"):
                found |= {origin}
        return found

    def member(self, module: Module, owner: cst.ClassDef, name: str, seen: frozenset[int] = frozenset()) -> Origins:
        """Origins of an attribute of a class: what its body and its methods, or other code, store in it."""
        if id(owner) in seen:
            return NOTHING
        found: Origins = given(self, owner, name)
        for where, target in self.stores(name):
            holders = {id(o.node) for o in self.origins(where, target.value) if o.kind in (INSTANCE, CLASS)}
            if id(owner) in holders or holders & self.derived(owner):
                found |= self._target(where, target)
        for line in owner.body.body:
            if isinstance(line, cst.FunctionDef) and line.name.value == name:
                found |= self.origins(module, line)
            for small in getattr(line, "body", ()) if isinstance(line, cst.SimpleStatementLine) else ():
                for bound in assigned_names(small):
                    if isinstance(bound, cst.Name) and bound.value == name:
                        stored = self._target(module, bound)
                        self.defaults |= {id(origin.node) for origin in stored}
                        found |= stored
        if not found:
            for base in owner.bases:
                for origin in self.origins(module, base.value):
                    if isinstance(origin.node, cst.ClassDef):
                        found |= self.member(origin.module, origin.node, name, seen | {id(owner)})
        return found

    def derived(self, owner: cst.ClassDef) -> set[int]:
        """The classes of the program that derive from a class: what it calls `self` may be one of them."""
        key = id(owner)
        if key not in self._subclasses:
            self._subclasses[key] = set()
            found: set[int] = set()
            for module in self.program:
                for one in module.every(cst.ClassDef):
                    names = {
                        b.value.attr.value
                        if isinstance(b.value, cst.Attribute)
                        else b.value.value
                        if isinstance(b.value, cst.Name)
                        else ""
                        for b in one.bases
                    }
                    if owner.name.value in names and any(
                        o.node is owner for b in one.bases for o in self.origins(module, b.value)
                    ):
                        found |= {id(one)} | self.derived(one)
            self._subclasses[key] = found
        return self._subclasses[key]

    def stores(self, attribute: str) -> list[tuple[Module, cst.Attribute]]:
        """All places in the program that assign to an attribute of some name."""
        modules = list(self.program)
        if self._stores_of != len(modules):
            self._stores = {}
            for module in modules:
                for node in module.every(cst.Attribute):
                    if is_store(module, node):
                        self._stores.setdefault(node.attr.value, []).append((module, node))
            self._stores_of = len(modules)
        return self._stores.get(attribute, [])

    def _call(self, module: Module, node: cst.Call) -> Origins:
        found: Origins = NOTHING
        if isinstance(node.func, cst.Name) and node.func.value == "getattr" and len(node.args) == 3:
            key = node.args[1].value  # `getattr(model, "module", model)` takes a wrapper off
            if isinstance(key, cst.SimpleString) and key.evaluated_value in ("module", "_orig_mod"):
                return self.origins(module, node.args[0].value) | self.origins(module, node.args[2].value)
        if isinstance(node.func, cst.Attribute) and node.func.attr.value in PASS_METHODS:
            base = self.origins(module, node.func.value)
            if not any(self._defines(o, node.func.attr.value) for o in base):
                passed = frozenset(o for o in base if o.kind in (CALL, INSTANCE))
                if passed:
                    return passed
        for origin in self.origins(module, node.func):
            if origin.kind == FUNCTION and isinstance(origin.node, cst.FunctionDef):
                found |= self.returned(origin.module, origin.node)
            elif origin.kind == CLASS:
                found |= {Origin(origin.module, origin.node, INSTANCE, origin.name)}
            elif origin.kind == NAME:
                if origin.name in PASS_CALLS and node.args and node.args[0].keyword is None:
                    found |= self.origins(module, node.args[0].value)
                found |= {Origin(module, node, CALL, origin.name)}
            elif origin.kind == CALL and origin.name == "functools.partial":
                inner = origin.node.args[0].value if isinstance(origin.node, cst.Call) and origin.node.args else None
                for target in self.origins(origin.module, inner) if inner is not None else ():
                    if target.kind == NAME:
                        found |= {Origin(module, node, CALL, target.name)}
                    elif target.kind == FUNCTION and isinstance(target.node, cst.FunctionDef):
                        found |= self.returned(target.module, target.node)
        return found

    def _defines(self, origin: Origin, method: str) -> bool:
        """Whether the class of an instance has a method of its own of a name that modules of torch have, too."""
        if origin.kind not in (NAME, INSTANCE, CLASS) or not isinstance(origin.node, cst.ClassDef):
            return False
        return origin.kind != INSTANCE or bool(self.member(origin.module, origin.node, method))

    def returned(self, module: Module, function: cst.FunctionDef) -> Origins:
        """Origins of all values that a function returns."""
        found: Origins = NOTHING
        for statement in returns(module, function):
            if statement.value is not None:
                found |= self.origins(module, statement.value)
        return found

    def calls_named(self, name: str) -> list[tuple[Module, cst.Call]]:
        """All calls in the program of something whose last name is `name`."""
        modules = list(self.program)
        if self._indexed != len(modules):
            self._calls_by_name = {}
            for module in modules:
                for call in module.every(cst.Call):
                    last = call.func.attr if isinstance(call.func, cst.Attribute) else call.func
                    if isinstance(last, cst.Name):
                        self._calls_by_name.setdefault(last.value, []).append((module, call))
            self._indexed = len(modules)
        return self._calls_by_name.get(name, [])
