"""Small things of deepspeed.utils and deepspeed.runtime that a script uses besides the engine become plain Python.

What: `log_dist`, `set_random_seed`, `RepeatingLoader` become functions or classes of the same name that are written
into the file; `logger` becomes a logger of the logging module; schedulers of deepspeed.runtime.lr_schedules become the
same torch schedulers that a config's do.

Why: they are all that keeps DeepSpeed installed once the engine is gone.

Before::

    from deepspeed.utils import RepeatingLoader, log_dist
    batches = RepeatingLoader(loader)
    log_dist("start", ranks=[0])

After::

    batches = RepeatingLoader(loader)  # a class of this file
    log_dist("start", ranks=[0])       # a function of this file

In numbers: equal. The loader starts its iterator where DeepSpeed's does, so that random numbers are drawn at the same
time; `set_random_seed` seeds Python, NumPy and torch.

Known limits: the logger writes to standard error in a format of its own.
"""

from __future__ import annotations

import re

import libcst as cst

from ..draft import Draft
from ..grade import Grade
from ..schedules import PORTS, port
from ..syntax import argument_of

SOURCES = ("deepspeed",)

LOG_DIST = '''def log_dist(message, ranks=None, level=LOGGING.INFO):
    """Log a message on some ranks, on all for [-1]; before there are ranks, everywhere."""
    rank = DIST.get_rank() if DIST.is_initialized() else -1
    if rank < 0 or (ranks and (ranks[0] == -1 or rank in ranks)):
        LOGGER.log(level, "[Rank %s] %s", rank, message)'''

LOGGER = """LOGGING.basicConfig(level=LOGGING.INFO, format="[%(asctime)s] [%(levelname)s] %(message)s")
LOGGER = LOGGING.getLogger("train")"""

SEED = '''def set_random_seed(seed):
    """Seed the random numbers of Python, NumPy and torch."""
    RANDOM.seed(seed)
    NUMPY.random.seed(seed % 2**32)
    TORCH.manual_seed(seed % 2**63)'''

REPEATING = '''class RepeatingLoader:
    """A loader without an end: it starts again where it ends."""

    def __init__(self, loader):
        self.loader = loader
        self.batches = iter(loader)

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            return next(self.batches)'''

_FUNCTIONS = {"log_dist": LOG_DIST, "set_random_seed": SEED, "RepeatingLoader": REPEATING}
_HOMES = ("deepspeed.utils.", "deepspeed.runtime.utils.", "deepspeed.runtime.dataloader.", "deepspeed.utils.logging.")
_SCHEDULES = "deepspeed.runtime.lr_schedules."


def rewrite(draft: Draft) -> None:
    """Rewrite all uses, unless an engine stays."""
    module = draft.module
    if any(wrap.plan.refused for wrap in draft.all_wraps if wrap.source == "deepspeed"):
        return
    for node in module.every(cst.Name, cst.Attribute):
        parent = module.parent(node)
        inner = isinstance(parent, cst.Attribute) and parent.attr is node
        if inner or module.up(node, cst.Import, cst.ImportFrom) is not None or module.skips(node):
            continue
        name = draft.name(node)
        home = next((h for h in _HOMES if name.startswith(h)), "")
        last = name.removeprefix(home)
        if home and last in _FUNCTIONS:
            _written(draft, last, _FUNCTIONS[last])
            draft.replace(node, last)
            draft.note(node, Grade.EXACT, f"{last} is written into the file")
        elif home and last == "logger":
            draft.replace(node, _logger(draft))
            draft.note(node, Grade.EXACT, "DeepSpeed's logger becomes one of the logging module")
    for call in module.every(cst.Call):
        name = draft.flow.called(module, call)
        if name.startswith(_SCHEDULES) and not module.skips(call):
            _schedule(draft, call, name.removeprefix(_SCHEDULES))


def _written(draft: Draft, name: str, text: str) -> None:
    needed = {
        "LOGGING": lambda: draft.need_module("logging"),
        "LOGGER": lambda: _logger(draft),
        "DIST": lambda: draft.need_module("torch.distributed", "dist"),
        "RANDOM": lambda: draft.need_module("random"),
        "NUMPY": lambda: draft.need_module("numpy"),
        "TORCH": lambda: draft.need_module("torch"),
    }
    words = re.compile(rf"\b({'|'.join(needed)})\b")
    if name not in draft.helpers:
        draft.helpers[name] = words.sub(lambda found: needed[found.group()](), text)


def _logger(draft: Draft) -> str:
    """The name of the file's logger, which is written into it."""
    bound = draft.bound_import("deepspeed.utils.logger") or draft.bound_import("deepspeed.utils.logging.logger")
    name = bound if bound is not None and "." not in bound else draft.throwaway("logger", "log")
    if "logger" not in draft.helpers:
        logging = draft.need_module("logging")
        draft.helpers["logger"] = re.sub(r"\bLOGGER\b", name, LOGGER.replace("LOGGING", logging))
    return name


def _schedule(draft: Draft, call: cst.Call, kind: str) -> None:
    if kind not in PORTS or any(argument.star for argument in call.args):
        draft.todo(call, f"{kind} with these arguments: use a scheduler of torch.optim.lr_scheduler")
        return
    names = list(PORTS[kind].parameters)
    found = {name: argument_of(call, names, name) for name in names}
    optimizer, start = found.pop("optimizer"), found.pop("last_batch_iteration")
    if optimizer is None or (start is not None and draft.code(start) != "-1"):
        draft.todo(call, f"{kind} that starts in the middle: set last_epoch of the scheduler")
        return
    given = {name: draft.module.quote(node) for name, node in found.items() if node is not None}
    draft.replace(call, *port(draft, kind, draft.module.quote(optimizer), given))
    draft.note(call, Grade.EXACT, f"{kind} becomes a scheduler of torch, written into the file")
