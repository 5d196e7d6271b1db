"""Fact: the DeepSpeed config of a `deepspeed.initialize` call, read from a dict in the code or a JSON file in the
tree.

A config is a tree of dicts. Its leaves are plain JSON values, or `Value`s: expressions that only the run evaluates.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libcst as cst

from .draft import Draft
from .module import Module
from .origin import CALL, FUNCTION, Origin
from .syntax import argument_of
from .wraps import Value, Wrap

Tree = dict[str, Any]  # nested; leaves are JSON values or Values
_FLAG = re.compile(r"--(?:deepspeed_config|deepspeed)[ =]+([\w./-]+\.json)")


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
            return _read(draft, value)
    value = wrap.get("args")
    if value is None:
        return Unknown("the call names no config")
    path = _default_of_flag(draft) or _from_launch_lines(wrap.module.path)
    if path is None:
        return Unknown("the config is named on the command line: give --deepspeed_config a default, or pass config=")
    return _from_file(path, wrap.module)


def _read(draft: Draft, value: Value) -> Tree | Unknown:
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
        return Unknown(f"the config {_short(module.code(node))} is only known at run time")
    origin = origins[0]
    made = origin.node
    if isinstance(made, cst.Dict):
        function = origin.module.function(made)
        if function is not None and function is not module.function(node):
            return Unknown(f"the config is built by the function {_named(function)}")
        tree = _tree(draft, origin.module, made)
        return tree if isinstance(tree, Unknown) else _with_stores(draft, origin, tree)
    if origin.kind == CALL and origin.name == "json.load" and isinstance(made, cst.Call):
        path = _opened(draft, origin.module, made)
        if path is None:
            return Unknown("the path of the config file is only known at run time")
        tree = _from_file(path, origin.module)
        return tree if isinstance(tree, Unknown) else _with_stores(draft, origin, tree)
    if origin.kind == FUNCTION:
        return Unknown(f"the config is built by the function {origin.name}")
    return Unknown(f"the config {_short(module.code(node))} is only known at run time")


def _named(function: cst.CSTNode) -> str:
    return function.name.value if isinstance(function, cst.FunctionDef) else "around it"


def _short(code: str) -> str:
    flat = " ".join(code.split())
    return flat if len(flat) < 60 else flat[:57] + "..."


# -- dicts in code ------------------------------------------------------------------------------------------------


def _tree(draft: Draft, module: Module, node: cst.Dict) -> Tree | Unknown:
    found: Tree = {}
    for element in node.elements:
        if not isinstance(element, cst.DictElement) or not isinstance(element.key, cst.SimpleString):
            return Unknown("the config holds keys that are only known at run time")
        leaf = _leaf(draft, module, element.value)
        if isinstance(leaf, Unknown):
            return leaf
        found[str(element.key.evaluated_value)] = leaf
    return found


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
        if isinstance(made, cst.Dict):
            return _tree(draft, origins[0].module, made)
        if isinstance(made, (cst.Integer, cst.Float, cst.SimpleString)) or origins[0].name in ("True", "False", "None"):
            return ast.literal_eval(origins[0].module.code(made))
    return Value(module, node)


def _with_stores(draft: Draft, origin: Origin, tree: Tree) -> Tree | Unknown:
    """The tree with what straight-line code stores into it: `config["optimizer"]["params"]["lr"] = args.lr`."""
    home = origin.module
    line = home.line(origin.node)
    for subscript in home.every(cst.Subscript):
        path = _path(subscript)
        if path is None or not any(o.node is origin.node for o in draft.flow.origins(home, path[0])):
            continue
        assign = home.parent(home.parent(subscript) or subscript)
        if not isinstance(assign, cst.Assign) or all(t.target is not subscript for t in assign.targets):
            continue
        keys = path[1]
        straight = home.function(subscript) is home.function(origin.node) and (
            home.parent(home.line(subscript)) is home.parent(line) or home.up(line, cst.With) is not None
        )
        if keys is None or not straight or home.up(subscript, cst.If, cst.For, cst.While, cst.Try) is not None:
            return Unknown(f"the config is changed on the way: {_short(home.code(assign))}")
        branch = tree
        for key in keys[:-1]:
            branch = branch.setdefault(key, {})
            if not isinstance(branch, dict):
                return Unknown(f"the config is changed on the way: {_short(home.code(assign))}")
        leaf = _leaf(draft, home, assign.value)
        if isinstance(leaf, Unknown):
            return leaf
        branch[keys[-1]] = leaf
    for call in home.every(cst.Call):
        func = call.func
        if isinstance(func, cst.Attribute) and func.attr.value in ("update", "pop", "setdefault", "clear"):
            base = func.value
            while isinstance(base, cst.Subscript):
                base = base.value
            if isinstance(base, cst.Name) and any(o.node is origin.node for o in draft.flow.origins(home, base)):
                return Unknown(f"the config is changed on the way: {_short(home.code(call))}")
    return tree


def _path(node: cst.Subscript) -> tuple[cst.Name, list[str] | None] | None:
    """(name, keys) of `name["a"]["b"]`; keys None where one is computed."""
    keys: list[str] | None = []
    at: cst.BaseExpression = node
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
