"""The one error tree of ckptkit: every error says what happened, why, and what to do next, and knows its exit code."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of the command line; the README's table is checked against this enum by a test."""

    OK = 0
    FINDINGS = 1
    USAGE = 2
    SOURCE = 3
    EXISTS = 4
    LOSS = 5
    CHECK = 6
    BUG = 101
    INTERRUPTED = 130


class CkptkitError(Exception):
    """Base of all errors that ckptkit raises on purpose.

    `what` happened, `why` it did, `hint` is the next step for a person, `faults` lists every single fault where there
    are several (every missing rank, not the first). `code` is the exit code of the command line.
    """

    code: Exit = Exit.BUG

    def __init__(self, what: str, *, why: str = "", hint: str = "", faults: Iterable[str] = ()) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.hint = hint
        self.faults = tuple(faults)

    def __str__(self) -> str:
        lines = [self.what, *(f"  - {fault}" for fault in self.faults)]
        if self.why:
            lines.append(f"why: {self.why}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


class UsageError(CkptkitError):
    """The call itself is off: options that exclude each other, an unknown name."""

    code = Exit.USAGE


class SourceError(CkptkitError):
    """The source cannot be read: missing, truncated, incomplete, of no known or of two formats."""

    code = Exit.SOURCE


class UnsafePickleError(SourceError):
    """A pickle names a global that could only be there to run something; nothing of it was run."""


class AmbiguousError(SourceError):
    """The files admit two readings and only a person can say which is right."""


class TargetError(CkptkitError):
    """The destination cannot be written."""

    code = Exit.EXISTS


class ExistsError(TargetError):
    """The destination exists and `--overwrite` was not given."""


class LossError(CkptkitError):
    """The target cannot hold all that the source holds; `faults` names each thing."""

    code = Exit.LOSS


class CheckError(CkptkitError):
    """What was written does not read back as what was planned; the staged output was removed."""

    code = Exit.CHECK


class MissingPackageError(UsageError):
    """An optional package is needed for this and is not installed; the hint names the extra."""

    def __init__(self, package: str, *, needed_for: str, extra: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed",
            why="it is an optional dependency, imported only where it is used",
            hint=f"pip install '.[{extra}]' in the ckptkit checkout, or pip install {package}",
        )
        self.package = package
