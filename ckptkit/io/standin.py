"""Stand-ins: inert objects that take the place of classes which a pickle names and which are never imported."""

from __future__ import annotations

from typing import Any


class _Inert(type):
    """Type of all stand-in classes. A pickle can neither change them nor learn anything from them."""

    kind: str

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError("stand-ins cannot be changed")

    def __repr__(cls) -> str:
        return f"<stand-in class {cls.kind}>"


class Standin(metaclass=_Inert):
    """An object of a class that was not imported: the class's qualified name and what the pickle gave to it.

    `args` are the positional arguments of its construction, `state` what the pickle would have set on it (usually its
    `__dict__`), `items` the entries of a dict subclass, `elements` those of a list subclass.
    """

    kind = "?"
    args: tuple[Any, ...]
    state: Any
    items: dict[Any, Any]
    elements: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Standin:
        self = object.__new__(cls)
        fields = self.__dict__
        fields.update(args=args, state=kwargs or None, items={}, elements=[])
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, value: Any) -> None:
        self.elements.append(value)

    def extend(self, values: Any) -> None:
        self.elements.extend(values)

    def add(self, value: Any) -> None:
        self.elements.append(value)

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute that the pickle set, from a state dict or a (dict, slots) pair."""
        for part in self.state if isinstance(self.state, tuple) else (self.state,):
            if isinstance(part, dict) and name in part:
                return part[name]
        return default

    def __repr__(self) -> str:
        return f"<stand-in for {type(self).kind}>"


def standin_class(module: str, name: str) -> type[Standin]:
    """The stand-in for the class (or function: calling it only makes an object) `module.name`."""
    made: Any = _Inert(name.rpartition(".")[2] or "Standin", (Standin,), {"kind": f"{module}.{name}"})
    return made


def kind_of(value: object) -> str:
    """The qualified class name that a stand-in stands for; empty for anything else."""
    return type(value).kind if isinstance(value, Standin) else ""
