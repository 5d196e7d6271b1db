"""Open a checkpoint of any format: find its container and its dialect, read its metadata, bring names to one form."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .core.assemble import Hints, assemble
from .core.checkpoint import Contents, ModelFacts
from .core.options import ReadOptions
from .core.pick import pick
from .core.plan import check_coverage
from .core.tree import outline
from .dialects import Dialect, ForFolders, ForKeys, dialects
from .errors import SourceError, UsageError
from .formats import Format, formats
from .io.places import forget_open_files
from .opened import OpenCheckpoint, as_checkpoint

# A strategy's name as `--from` means any of the containers that its runs write.
STRATEGY_FORMATS: Mapping[str, tuple[str, ...]] = {
    "ddp": ("full", "safetensors", "dcp"),
    "fsdp1": ("full", "dcp", "rank_files"),
    "fsdp2": ("dcp", "rank_files", "full", "safetensors"),
    "fsdp": ("full", "dcp", "rank_files"),
    "deepspeed": ("zero", "universal"),
}


@dataclass(frozen=True, slots=True)
class Source:
    """How a path will be read: a dialect (None: still to be told from the keys) and a container for each part."""

    dialect: Dialect | None
    parts: Mapping[str, tuple[Path, Format]]
    evidence: tuple[str, ...]


def open(
    path: str | os.PathLike[str],
    format: str = "auto",
    dialect: str = "auto",
    *,
    param_names: Sequence[str] | None = None,
    model: str | ModelFacts | None = None,
    model_key: str | None = None,
    optimizer_key: str | None = None,
) -> OpenCheckpoint:
    """Open a checkpoint: its names, shapes, groups and extras, no tensor bytes.

    `format` and `dialect` name what is otherwise found from file names, headers and keys. `param_names` (the
    parameters in the order in which the optimizer got them) or `model` (`pkg.mod:factory`, built on the meta device,
    or what that answered) say what a file with integer ids or flat parameters may leave open. `model_key` and
    `optimizer_key` (`netG`, `networks.generator`) choose one model of several, or one under a name that is not usual.

    Raises SourceError (missing, damaged, incomplete, unknown), its subclasses AmbiguousError and UnsafePickleError,
    and UsageError for a name that does not exist.
    """
    where = Path(path)
    # Files that were read before may have been replaced under their names since.
    forget_open_files()
    try:
        return _open(where, format, dialect, param_names, model, (model_key, optimizer_key))
    except OSError as error:
        raise SourceError(
            f"cannot read {where}", why=str(error), hint="check that the path is there and may be read"
        ) from error


def _open(
    where: Path,
    format: str,
    dialect: str,
    param_names: Sequence[str] | None,
    model: str | ModelFacts | None,
    keys: tuple[str | None, str | None],
) -> OpenCheckpoint:
    if not where.exists():
        raise SourceError(
            f"{where} does not exist", why="there is no such file or folder", hint="check the path and its spelling"
        )
    facts = model if not isinstance(model, str) else None
    if isinstance(model, str):
        from .io.model import describe

        facts = describe(model)
    options = ReadOptions(Hints(tuple(param_names) if param_names is not None else None, facts))
    source = find_source(where, format, dialect)
    parts = {role: container.read(part, options) for role, (part, container) in source.parts.items()}
    if any(keys):
        parts[""] = replace(parts[""], tree=pick(parts[""].tree, *keys))
    chosen, evidence = (source.dialect, "") if source.dialect else _dialect_of(parts[""], dialect, where)
    assembled = assemble(chosen.read(parts), options.hints)
    check_coverage(assembled.entries.items())
    main = next(iter(parts.values()))
    wrapped = f"every name began with {assembled.prefix!r}, a wrapper's: taken off" if assembled.prefix else ""
    sizes = [part.world_size for part in parts.values() if part.world_size is not None]
    return as_checkpoint(
        assembled,
        path=str(where),
        format=main.format,
        dialect=chosen.NAME,
        evidence=tuple(text for text in (*source.evidence, evidence, wrapped) if text),
        world_size=max(sizes, default=None),
    )


def find_source(path: Path, format: str, dialect: str) -> Source:
    """The container of a path and of a folder's parts, by names and headers alone.

    Raises SourceError where nothing fits or two things do.
    """
    known, named = dialects(), None
    if dialect != "auto":
        if dialect not in known:
            raise UsageError(
                f"there is no dialect {dialect!r}",
                why="a dialect is a file of ckptkit/dialects",
                hint=f"there are {', '.join(sorted(known))}",
            )
        named = known[dialect]
    folders = _folders(path, [named] if named else known.values())
    if len(folders) > 1:
        names = " and ".join(sorted(module.NAME for module, _ in folders))
        raise SourceError(
            f"{path} looks like {names}",
            why="the names of its files fit more than one framework",
            hint="name one of them with --dialect",
        )
    if folders and (named or format == "auto"):
        module, found = folders[0]
        known_formats = formats()
        parts = {
            role: (part, known_formats["json"] if part.suffix == ".json" else _container(part, "auto"))
            for role, part in found.items()
        }
        return Source(module, parts, (f"a folder with {', '.join(part.name for part in found.values())}",))
    if named is not None and not isinstance(named, ForKeys):
        raise SourceError(
            f"{path} is no folder of {dialect}",
            why=_what_is_there(path),
            hint="leave --dialect out, or name the folder itself",
        )
    container = _container(path, format)
    evidence = container.detect(path) or f"named by --from {format}"
    return Source(named, {"": (path, container)}, (evidence,))


def _folders(path: Path, candidates: Iterable[Dialect]) -> list[tuple[Dialect, Mapping[str, Path]]]:
    found = []
    for module in candidates:
        parts = module.find(path) if path.is_dir() and isinstance(module, ForFolders) else None
        if parts is not None:
            found.append((module, parts))
    return found


def _container(path: Path, format: str) -> Format:
    known = formats()
    if format in known:
        return known[format]
    if format != "auto" and format not in STRATEGY_FORMATS:
        raise UsageError(
            f"there is no format {format!r}",
            why="a format is a file of ckptkit/formats, or a strategy's name",
            hint=f"there are {', '.join(sorted(known))}; strategies: {', '.join(STRATEGY_FORMATS)}",
        )
    names = STRATEGY_FORMATS.get(format, tuple(known))
    found = {name: said for name in names if name in known and (said := known[name].detect(path))}
    if len(found) == 1:
        return known[next(iter(found))]
    if found:
        seen = ", ".join(f"{name} ({said})" for name, said in found.items())
        raise SourceError(
            f"{path} looks like two formats: {seen}",
            why="files of both lie in one folder",
            hint="name one of them with --from",
        )
    raise SourceError(
        f"{path} is of no format that ckptkit knows",
        why=_what_is_there(path),
        hint=f"--from names a format: {', '.join(sorted(known))}",
    )


def _what_is_there(path: Path) -> str:
    if path.is_dir():
        names = sorted(item.name for item in path.iterdir())
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return f"it holds {', '.join(names[:8]) or 'nothing'}{more}"
    with path.open("rb") as file:
        return f"it is a file of {path.stat().st_size} bytes that starts with {file.read(8)!r}"


def _dialect_of(contents: Contents, name: str, path: Path) -> tuple[Dialect, str]:
    claims = {
        module.NAME: (module, said)
        for module in dialects().values()
        if isinstance(module, ForKeys) and (said := module.claims(contents))
    }
    if len(claims) == 1:
        return next(iter(claims.values()))
    if claims:
        seen = ", ".join(f"{key} ({said})" for key, (_, said) in claims.items())
        raise SourceError(
            f"the keys of {path} fit two dialects: {seen}",
            why="both have keys of these names",
            hint="name one of them with --dialect",
        )
    raise SourceError(
        f"the keys of {path} follow no convention that ckptkit knows",
        why=f"it saw {outline(contents.tree)}",
        hint="--model-key and --optimizer-key name the parts of one model, and the rest goes along as it is; "
        f"--dialect names a convention: {', '.join(sorted(dialects()))}",
    )
