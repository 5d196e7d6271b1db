"""Fact: the DeepSpeed config of a `deepspeed.initialize` call, read from a dict in the code or a JSON file in the
tree.

A config is a tree of dicts. Its leaves are plain JSON values, or `Value`s: expressions that only the run evaluates.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libcst as cst

from .draft import Draft
from .module import Module
from .origin import CALL, FUNCTION, Origin
from .syntax import argument_of, is_store, returns, surely_ran
from .wraps import Value, Wrap

Tree = dict[str, Any]  # nested; leaves are JSON values or Values
_FLAG = re.compile(r"--(?:deepspeed_config|deepspeed)[ =]+([\w./-]+\.json)")


_CHANGERS = ("update", "pop", "setdefault", "clear", "popitem")


@dataclass(frozen=True, slots=True, eq=False)
class Said(Value):
    """An expression of a function that builds a config, in the words of the call of that function (`node`)."""

    text: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """Why a config cannot be read."""

    reason: str


def read_config(draft: Draft, wrap: Wrap) -> Tree | Unknown:
    """The config of a call, whichever way it was given (deepspeed 0.19.8 `initialize`: `config`, its old name
    `config_params`, or `args.deepspeed_config`)."""
    for name in ("config", "config_params"):
        value = wrap.get(name)
        if value is not None:
            return config_of(draft, value)
    value = wrap.get("args")
    if value is None:
        return Unknown("the call names no config")
    path = _default_of_flag(draft) or _from_launch_lines(wrap.module.path)
    if path is None:
        return Unknown("the config is named on the command line: give --deepspeed_config a default, or pass config=")
    return _from_file(path, wrap.module)


def config_of(draft: Draft, value: Value) -> Tree | Unknown:
    """The config that an expression is: a dict of the code, or a JSON file of the tree by its path."""
    module, node = value.module, value.node
    literal = _literal_path(draft, module, node)
    if literal is not None:
        return _from_file(literal, module)
    origins = list(draft.flow.origins(module, node))
    if not origins and isinstance(node, cst.Attribute):
        path = _default_of_flag(draft, node.attr.value)
        return (
            _from_file(path, module) if path else Unknown(f"the config {module.code(node)} is only known at run time")
        )
    if len(origins) != 1:
        dicts = all(isinstance(o.node, cst.Dict) for o in origins)
        makers = [o.module.function(o.node) for o in origins] if dicts else []
        made_by = makers[0] if makers and all(maker is makers[0] for maker in makers) else None
        if isinstance(made_by, cst.FunctionDef) and made_by is not module.function(node):
            return Unknown(f"the config is built by the function {made_by.name.value}, in more ways than one")
        return Unknown(f"the config {_short(module.code(node))} is only known at run time")
    origin = origins[0]
    made = origin.node
    if isinstance(made, cst.Dict) or (origin.kind == CALL and origin.name == "builtins.dict"):
        function = origin.module.function(made)
        if isinstance(function, cst.FunctionDef) and function is not module.function(node):
            if len(returns(origin.module, function)) > 1:
                return Unknown(f"the config is built by the function {function.name.value}, in more ways than one")
        elif function is not None and function is not module.function(node):
            return Unknown(f"the config is built by {_short(origin.module.code(function))}")
        tree = _tree(draft, origin.module, made)
        return tree if isinstance(tree, Unknown) else _with_changes(draft, origin, tree, value)
    if origin.kind == CALL and origin.name == "json.load" and isinstance(made, cst.Call):
        path = _opened(draft, origin.module, made)
        if path is None:
            return Unknown("the path of the config file is only known at run time")
        tree = _from_file(path, origin.module)
        return tree if isinstance(tree, Unknown) else _with_changes(draft, origin, tree, value)
    if origin.kind == FUNCTION:
        return Unknown(f"the config is built by the function {origin.name}")
    return Unknown(f"the config {_short(module.code(node))} is only known at run time")


def _short(code: str) -> str:
    flat = " ".join(code.split())
    return flat if len(flat) < 60 else flat[:57] + "..."


# -- dicts in code ------------------------------------------------------------------------------------------------


def _tree(draft: Draft, module: Module, node: cst.CSTNode) -> Tree | Unknown:
    """The tree of `{...}` or `dict(...)`, with `**other` where the other is known, too."""
    found: Tree = {}
    for key, value in _entries(node):
        if key is None:  # `**other`
            origins = list(draft.flow.origins(module, value))
            inner = _tree(draft, origins[0].module, origins[0].node) if len(origins) == 1 else None
            if not isinstance(inner, dict) or not isinstance(origins[0].node, (cst.Dict, cst.Call)):
                return Unknown(f"what **{_short(module.code(value))} puts into the config is only known at run time")
            found |= inner
        elif not key:
            return Unknown("the config holds keys that are only known at run time")
        else:
            leaf = _leaf(draft, module, value)
            if isinstance(leaf, Unknown):
                return leaf
            found[key] = leaf
    return found


def _entries(node: cst.CSTNode) -> Iterator[tuple[str | None, cst.BaseExpression]]:
    """(key, value) of a dict's elements: the key None for `**value`, empty for one that is computed."""
    if isinstance(node, cst.Dict):
        for element in node.elements:
            if isinstance(element, cst.DictElement):
                text = element.key.evaluated_value if isinstance(element.key, cst.SimpleString) else ""
                yield str(text), element.value
            else:
                yield None, element.value
    elif isinstance(node, cst.Call):
        for argument in node.args:
            key = argument.keyword.value if argument.keyword is not None else None if argument.star == "**" else ""
            yield key, argument.value


def _leaf(draft: Draft, module: Module, node: cst.BaseExpression) -> Any:
    """A JSON value where the text is one, a tree for a dict, else the expression."""
    try:
        plain = ast.literal_eval(module.code(node))
    except (ValueError, SyntaxError, MemoryError):
        plain = ...
    if plain is not ... and not isinstance(plain, (dict, set, bytes)):
        return plain
    if isinstance(node, cst.Dict):
        return _tree(draft, module, node)
    origins = list(draft.flow.origins(module, node))
    if len(origins) == 1 and draft.flow.is_fixed(module, node):
        made = origins[0].node
        if isinstance(made, cst.Dict) or origins[0].name == "builtins.dict":
            return _tree(draft, origins[0].module, made)
        if isinstance(made, (cst.Integer, cst.Float, cst.SimpleString)) or origins[0].name in ("True", "False", "None"):
            return ast.literal_eval(origins[0].module.code(made))
    return _said(draft, module, node) or Value(module, node)


def _said(draft: Draft, module: Module, node: cst.BaseExpression) -> Said | None:
    """An expression on the parameters of a function that is called once, in the words of its caller."""
    function = module.function(node)
    if not isinstance(function, cst.FunctionDef):
        return None
    callers = draft.flow.callers(module, function)
    parameters = [p.name.value for p in function.params.params]
    names = [node, *module.inside(node, cst.Name)] if isinstance(node, cst.Name) else module.inside(node, cst.Name)
    taken = [name for name in names if isinstance(name, cst.Name) and name.value in parameters]
    if len(callers) != 1 or not taken or draft.flow.owner(module, function) is not None:
        return None
    where, call = callers[0]
    start, text = module.span(node).start, module.code(node)
    for name in reversed(taken):
        argument = argument_of(call, parameters, name.value)
        holder = module.parent(name)
        if isinstance(holder, cst.Attribute) and holder.attr is name:
            continue
        if not isinstance(argument, (cst.Name, cst.Attribute, cst.Integer, cst.Float, cst.SimpleString)):
            return None
        span = module.span(name)
        text = text[: span.start - start] + where.code(argument) + text[span.stop - start :]
    locals_ = {t.value for t in module.inside(function, cst.Name) if is_store(module, t)}
    return None if locals_ & {n.value for n in names if isinstance(n, cst.Name)} else Said(where, call, text)


def _with_changes(draft: Draft, origin: Origin, tree: Tree, use: Value) -> Tree | Unknown:
    """The tree with what code on the way stores into it, in order: `config["optimizer"]["params"]["lr"] = args.lr`,
    `config.update(...)`.
    """
    for home, statement, target in _changes(draft, origin, use.module):
        change = Unknown(f"the config is changed on the way: {_short(home.code(statement))}")
        if not _straight(home, statement, origin, use):
            return change
        if isinstance(target, cst.Call):
            found = _updated(draft, home, target)
            if not isinstance(found, dict) or _path(target.func.value) is None:  # type: ignore[attr-defined]
                return change
            keys, leaves = _path(target.func.value)[1], found  # type: ignore[attr-defined, index]
        else:
            path = _path(target)
            assert path is not None and isinstance(statement, cst.Assign)
            keys = path[1]
            leaf = _leaf(draft, home, statement.value)
            if isinstance(leaf, Unknown):
                return leaf
            keys, leaves = (None, {}) if not keys else (keys[:-1], {keys[-1]: leaf})
        branch: Any = tree
        for key in keys or ():
            branch = branch.setdefault(key, {})
            if not isinstance(branch, dict):
                return change
        if keys is None:
            return change
        branch |= leaves
    return tree


def _changes(draft: Draft, origin: Origin, other: Module) -> list[tuple[Module, cst.CSTNode, cst.Subscript | cst.Call]]:
    """(module, statement, what is stored to or called) of all that changes a dict, those beside its making first."""
    found: list[tuple[Module, cst.CSTNode, cst.Subscript | cst.Call]] = []
    for home in [origin.module, *([other] if other is not origin.module else [])]:
        nodes: list[cst.Subscript | cst.Call] = [*home.every(cst.Subscript), *home.every(cst.Call)]
        for node in nodes:
            if isinstance(node, cst.Call):
                func = node.func
                if not isinstance(func, cst.Attribute) or func.attr.value not in _CHANGERS:
                    continue
                base, statement = _path(func.value), home.parent(node)
            else:
                base, statement = _path(node), home.parent(home.parent(node) or node)
                if not isinstance(statement, cst.Assign) or all(t.target is not node for t in statement.targets):
                    continue
            if base is not None and any(o.node is origin.node for o in draft.flow.origins(home, base[0])):
                found.append((home, statement or node, node))
    function = origin.module.function(origin.node)
    return sorted(found, key=lambda one: (one[0].function(one[1]) is not function, one[0].span(one[1]).start))


def _straight(home: Module, statement: cst.CSTNode, origin: Origin, use: Value) -> bool:
    """Whether a change runs on every way from the making of a dict to its use."""
    function = home.function(statement)
    if home is use.module and function is home.function(use.node):
        return home.span(statement).start < home.span(use.node).start and surely_ran(home, statement, use.node)
    if home is not origin.module or function is not home.function(origin.node):
        return False
    ends = returns(home, function) if isinstance(function, cst.FunctionDef) else []
    if ends:
        return surely_ran(home, statement, ends[0])
    return home.parent(home.line(statement)) is home.parent(home.line(origin.node))


def _updated(draft: Draft, home: Module, call: cst.Call) -> Tree | Unknown | None:
    """What `config.update(...)` brings: one dict, or keywords."""
    if not isinstance(call.func, cst.Attribute) or call.func.attr.value != "update":
        return None
    if len(call.args) == 1 and call.args[0].keyword is None and not call.args[0].star:
        origins = list(draft.flow.origins(home, call.args[0].value))
        known = len(origins) == 1 and (isinstance(origins[0].node, cst.Dict) or origins[0].name == "builtins.dict")
        return _tree(draft, origins[0].module, origins[0].node) if known else None
    return _tree(draft, home, call)


def _path(node: cst.BaseExpression) -> tuple[cst.Name, list[str] | None] | None:
    """(name, keys) of `name["a"]["b"]`; keys None where one is computed."""
    keys: list[str] | None = []
    at = node
    while isinstance(at, cst.Subscript):
        index = at.slice[0].slice if len(at.slice) == 1 else None
        if isinstance(index, cst.Index) and isinstance(index.value, cst.SimpleString) and keys is not None:
            keys.insert(0, str(index.value.evaluated_value))
        else:
            keys = None
        at = at.value
    return (at, keys) if isinstance(at, cst.Name) else None


# -- files --------------------------------------------------------------------------------------------------------


def _from_file(text: str, module: Module) -> Tree | Unknown:
    """A JSON file, looked for from the working directory that a script most likely runs in: its own, or one above."""
    wanted = Path(text)
    folders = [Path()] if wanted.is_absolute() else [module.path.resolve().parent, *module.path.resolve().parents][:4]
    for folder in folders:
        path = folder / wanted
        if path.is_file():
            try:
                tree = json.loads(path.read_text())
            except (ValueError, OSError) as error:
                return Unknown(f"the config file {text} cannot be read: {error}")
            return tree if isinstance(tree, dict) else Unknown(f"the config file {text} holds no object")
    return Unknown(f"the config file {text} is not in the tree")


def _opened(draft: Draft, module: Module, load: cst.Call) -> str | None:
    """The path of `json.load(open(path))`, also of `with open(path) as f`."""
    given = argument_of(load, ["fp"], "fp")
    for origin in draft.flow.origins(module, given) if given is not None else ():
        if origin.name in ("builtins.open", "open") and isinstance(origin.node, cst.Call) and origin.node.args:
            path = origin.node.args[0].value
            if isinstance(path, cst.Attribute) and not draft.flow.origins(origin.module, path):
                return _default_of_flag(draft, path.attr.value)
            return _literal_path(draft, origin.module, path)
    return None


def _literal_path(draft: Draft, module: Module, node: cst.BaseExpression) -> str | None:
    """A path that the text tells: a string, `os.path.join(os.path.dirname(__file__), "x")`, `Path(__file__).parent /
    "x"`.
    """
    if isinstance(node, cst.Call) and node.args and draft.flow.called(module, node) in ("builtins.str", "pathlib.Path"):
        return _literal_path(draft, module, node.args[0].value)
    parts: list[cst.BaseExpression] = []
    if isinstance(node, cst.Call) and draft.flow.called(module, node) in ("os.path.join", "posixpath.join"):
        parts = [argument.value for argument in node.args]
    elif isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide):
        parts = [node.left, node.right]
    if parts:
        head, *rest = parts
        texts = [_literal_path(draft, module, part) for part in rest]
        if "__file__" not in _spelled_out(draft, module, head) or any(text is None for text in texts):
            return None
        return "/".join(text for text in texts if text)
    origins = list(draft.flow.origins(module, node))
    if len(origins) == 1 and draft.flow.is_fixed(module, node):
        made, home = origins[0].node, origins[0].module
        if isinstance(made, cst.SimpleString):
            return str(made.evaluated_value)
        if made is not node and isinstance(made, cst.Call):
            return _literal_path(draft, home, made)
    return None


def _spelled_out(draft: Draft, module: Module, node: cst.BaseExpression) -> str:
    origins = [o for o in draft.flow.origins(module, node) if isinstance(o.node, cst.Call)]
    return module.code(node) + " ".join(o.module.code(o.node) for o in origins)


def _default_of_flag(draft: Draft, flag: str = "deepspeed_config") -> str | None:
    """The default that the program's argparse gives to a flag, if the text tells it."""
    found = set()
    for module in draft.flow.program:
        for call in module.every(cst.Call):
            if not isinstance(call.func, cst.Attribute) or call.func.attr.value != "add_argument" or not call.args:
                continue
            names = [a.value for a in call.args if a.keyword is None and isinstance(a.value, cst.SimpleString)]
            if any(str(n.evaluated_value).lstrip("-").replace("-", "_") == flag for n in names):
                default = argument_of(call, [], "default")
                path = _literal_path(draft, module, default) if default is not None else None
                if path is not None:
                    found.add(path)
    return found.pop() if len(found) == 1 else None


def _from_launch_lines(path: Path) -> str | None:
    """The one config that the shell scripts and READMEs beside a script pass to it."""
    found = set()
    folder = path.resolve().parent
    for near in (folder, folder.parent):
        for script in [*near.glob("*.sh"), *near.glob("*.md"), *near.glob("scripts/*.sh")]:
            text = script.read_text(errors="replace")
            lines = text.replace("\\\n", " ").splitlines()
            found |= {m.group(1) for line in lines if path.name in line for m in _FLAG.finditer(line)}
    return found.pop() if len(found) == 1 else None


# -- questions ----------------------------------------------------------------------------------------------------


def entry(tree: Mapping[str, Any], dotted: str, default: Any = None) -> Any:
    """The leaf or branch at a dotted path; the default where it is absent or null."""
    at: Any = tree
    for key in dotted.split("."):
        if not isinstance(at, Mapping) or at.get(key) is None:
            return default
        at = at[key]
    return at
