"""What rules write into: the edits of one module, with imports to add, findings, and TODOs for a person."""

from __future__ import annotations

import dataclasses
import itertools
import re
import textwrap
from dataclasses import dataclass, field

import libcst as cst
from libcst.helpers import get_full_name_for_node

from .edit import Dedent, Edit, Piece, Rendering, Span
from .flow import Flow
from .grade import Finding, Grade
from .module import Module
from .names import PASS_CALLS
from .origin import CALL, INSTANCE, Origins
from .plan import Line
from .quotes import requoted
from .reflow import LIMIT
from .wraps import Wrap

TODO = "# TODO(ckptkit): "
MORE = "#   "  # before the further lines of a TODO that takes several
_CONTINUED = re.compile(r"\s*\n\s*#   ")


@dataclass(slots=True)
class Draft:
    """The draft of one module's new text. All methods take nodes of `module`; `rule` is the rule at work."""

    module: Module
    flow: Flow
    wraps: list[Wrap]
    all_wraps: list[Wrap]
    peers: dict[int, Draft] = field(default_factory=dict)  # drafts of all modules, by id of the module
    rule: str = ""
    edits: list[Edit] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    needs: dict[tuple[str, str], str] = field(
        default_factory=dict
    )  # (module, name) -> local name; name "" for a module
    left: set[int] = field(default_factory=set)  # ids of the statements that were left to a person
    deleted: list[cst.CSTNode] = field(default_factory=list)
    sweepable: list[cst.CSTNode] = field(default_factory=list)  # assignments to delete once nothing shows their names
    helpers: dict[str, str] = field(default_factory=dict)  # functions to be written into the file, by name
    hoisted: dict[int, tuple[dict[int, Line], list[Edit]]] = field(default_factory=dict)  # by guard: lines by place
    leaves: dict[int, Edit] = field(default_factory=dict)  # where the other ranks leave a function, by its id
    commands: list[str] = field(default_factory=list)  # `ckptkit convert` lines for checkpoints that the script loads
    _taken: set[str] = field(default_factory=set)
    _throwaways: dict[tuple[str, ...], str] = field(default_factory=dict)
    _exploded: set[int] = field(default_factory=set)
    _said: set[tuple[int, str]] = field(default_factory=set)  # TODOs, by the line that they stand above

    def restart(self) -> None:
        """Forget all that was drafted."""
        blank = Draft(self.module, self.flow, self.wraps, self.all_wraps, self.peers)
        for one in dataclasses.fields(self):
            setattr(self, one.name, getattr(blank, one.name))

    # -- questions -----------------------------------------------------------------------------------------------

    def origins(self, node: cst.CSTNode) -> Origins:
        """Where the value of an expression was made."""
        return self.flow.origins(self.module, node)

    def name(self, node: cst.CSTNode) -> str:
        """The API that an expression names: `torch.optim.AdamW`."""
        return self.flow.name(self.module, node)

    def calls(self, *names: str) -> list[cst.Call]:
        """All calls of some APIs in the module that no skip comment takes out."""
        found = [c for c in self.module.every(cst.Call) if self.flow.called(self.module, c) in names]
        return [c for c in found if not self.module.skips(c)]

    def wraps_of(self, node: cst.CSTNode, *sources: str) -> list[Wrap]:
        """The wraps whose model an expression may hold; none when one of them was refused, for its uses stay too."""
        origins = {id(o.node): o for o in self.origins(node)}
        found = []
        for wrap in self.all_wraps:
            origin = origins.get(id(wrap.call))
            if origin is None or (sources and wrap.source not in sources):
                continue
            if "[" in origin.name and not origin.name.endswith("[0]"):
                continue
            found.append(wrap)
        return [] if any(wrap.plan.refused for wrap in found) else found

    def may_be_plain(self, node: cst.CSTNode) -> bool:
        """Whether a model that is sharded on some ways may also be one that nobody wrapped.

        So it is when the expression has other origins too, and for `self.model` in a class whose subclass wraps it.
        """
        wraps = self.wraps_of(node)
        calls = {id(wrap.call) for wrap in wraps}
        others = (o for o in self.origins(node) if id(o.node) not in calls and o.name not in PASS_CALLS)
        if any(o.kind in (CALL, INSTANCE) and "[" not in o.name for o in others):
            return True
        function = self.module.function(node)
        owner = self.flow.owner(self.module, function) if function is not None else None
        if owner is None or not self.code(node).startswith("self."):
            return False
        makers = [wrap.module.up(wrap.call, cst.ClassDef) for wrap in wraps]
        return any(maker is not None and id(maker) in self.flow.derived(owner) for maker in makers)

    def is_migrated(self, node: cst.CSTNode) -> bool:
        """Whether an expression that an FSDP1 function is given is a model that will be sharded by FSDP2.

        True for the models of migrated wraps, and for those whose wrap is not in the program: the function itself says
        that it is an FSDP1 model. False where a wrap that it may come from stays.
        """
        origins = {id(o.node) for o in self.origins(node)}
        return not any(wrap.plan.refused and id(wrap.call) in origins for wrap in self.all_wraps)

    def methods(self, *names: str, sources: tuple[str, ...] = ()) -> list[tuple[cst.Call, list[Wrap]]]:
        """Calls of methods of some names on wrapped models, with the wraps."""
        found = []
        for call in self.module.every(cst.Call):
            if isinstance(call.func, cst.Attribute) and call.func.attr.value in names:
                wraps = self.wraps_of(call.func.value, *sources)
                if wraps and not self.module.skips(call):
                    found.append((call, wraps))
        return found

    def text(self, piece: Piece) -> str:
        """The original text that a piece stands for."""
        if isinstance(piece, str):
            return piece
        span = piece if isinstance(piece, Span) else piece.span
        return self.module.text.content[span.start : span.stop]

    def code(self, node: cst.CSTNode) -> str:
        """The source of a node as it stands."""
        return self.module.code(node)

    # -- edits ---------------------------------------------------------------------------------------------------

    def replace(self, node: cst.CSTNode, *pieces: Piece) -> bool:
        """Replace a node (its parentheses stay). False when another rule has already replaced exactly this node."""
        return self.replace_span(self.module.span(node), *requoted(self.module, node, pieces))

    def replace_span(self, span: Span, *pieces: Piece) -> bool:
        """Replace some characters. False when another edit has already replaced exactly these."""
        for edit in self.edits:
            if edit.span == span and not edit.inserts and not edit.moved:
                return edit.pieces == pieces
        self.edits.append(Edit(span, pieces))
        return True

    def statement_becomes(self, node: cst.CSTNode, lines: list[Line]) -> bool:
        """Replace the small statement that holds `node` by statements, one line each; none deletes it."""
        statement = self.module.statement(node)
        if not lines:
            self.delete(statement)
            return True
        if len(lines) > 1 or (lines[0] and str(lines[0][0]).startswith(("for ", "if ", "with "))):
            self.explode(statement)
        return self.replace(statement, *self.join(lines, self.inner_indent(statement)))

    def inner_indent(self, node: cst.CSTNode) -> str:
        """White space before statements at the level of the one that holds `node`."""
        line = self.module.line(node)
        indent = self.module.indent(node)
        return indent + self.module.step() if isinstance(line, cst.SimpleStatementSuite) else indent

    def join(self, lines: list[Line], indent: str) -> tuple[Piece, ...]:
        """Lines as pieces with newlines and indentation between them; `\\n` in a piece breaks and indents as well."""
        pieces: list[Piece] = []
        for index, line in enumerate(lines):
            if index:
                pieces.append(self.module.text.newline + indent)
            for piece in line:
                pieces.append(
                    piece.replace("\n", self.module.text.newline + indent) if isinstance(piece, str) else piece
                )
        return tuple(pieces)

    def explode(self, statement: cst.CSTNode) -> None:
        """Give each statement of `a; b` or `if x: a` a line of its own, so that one of them can become several."""
        line = self.module.line(statement)
        if id(line) in self._exploded or not isinstance(line, (cst.SimpleStatementLine, cst.SimpleStatementSuite)):
            return
        self._exploded.add(id(line))
        newline = self.module.text.newline + self.inner_indent(statement)
        content = self.module.text.content
        smalls = line.body
        if isinstance(line, cst.SimpleStatementSuite):
            start = self.module.span(smalls[0]).start
            colon = start
            while content[colon - 1] in " \t":
                colon -= 1
            self.replace_span(Span(colon, start), newline) if colon < start else self.edits.append(
                Edit(Span(start, start), (newline,), order=-1)
            )
        for first, second in itertools.pairwise(smalls):
            self.replace_span(Span(self.module.span(first).stop, self.module.span(second).start), newline)

    def unwrap(self, statement: cst.With | cst.If) -> bool:
        """Take the `with` or `if` line away and its body one level out. False where that would shift a text of several
        lines.
        """
        module, body = self.module, statement.body
        if not isinstance(body, cst.IndentedBlock):
            return False
        texts = module.inside(statement, cst.SimpleString, cst.FormattedString)
        if any("\n" in module.code(text) for text in texts):
            return False
        outer, inner = module.indent(statement), module.indent(body.body[0])
        lines = module.lines(statement)
        start = module.lines(body.body[0]).start
        comments = module.comments_above(body.body[0])
        quoted = Span(min(start, comments.start), lines.stop)
        return self.replace_span(lines, Dedent(quoted, inner.removeprefix(outer)))

    def before(self, node: cst.CSTNode, *lines: Line, order: int = 0) -> None:
        """Insert lines before the logical line that holds `node`."""
        line = self.module.line(node)
        if isinstance(line, cst.SimpleStatementSuite):
            self.explode(node)
            at = self.module.span(self.module.statement(node)).start
            indent = self.inner_indent(node)
            pieces = self.join([*lines, ("",)], indent)
            self.edits.append(Edit(Span(at, at), pieces, order=order))
            return
        at = self.module.lines(line).start
        self._insert(at, lines, self.module.indent(node), order, before=True)

    def after(
        self, node: cst.CSTNode, *lines: Line, order: int = 0, indent: str | None = None, outside: bool = False
    ) -> None:
        """Insert lines after the logical line that holds `node` (after the whole block of a compound statement).

        With `outside` they stay where they are when an edit quotes that line elsewhere or unwraps it.
        """
        line = self.module.line(node)
        at = self.module.lines(line).stop
        if isinstance(line, cst.SimpleStatementSuite):
            self.explode(node)
        self._insert(at, lines, self.inner_indent(node) if indent is None else indent, order, before=outside)

    def into(self, block: cst.CSTNode, *lines: Line, order: int = 0) -> None:
        """Insert lines at the start of an indented block."""
        first = block.body[0]  # type: ignore[attr-defined]
        self._insert(self.module.lines(first).start, lines, self.module.indent(first), order, before=True)

    def _insert(self, at: int, lines: tuple[Line, ...], indent: str, order: int, *, before: bool) -> None:
        newline = self.module.text.newline
        content = self.module.text.content
        lead = newline if at and content[at - 1] not in "\r\n" else ""
        pieces = self.join(list(lines), indent)
        self.edits.append(Edit(Span(at, at), (lead + indent, *pieces, newline), order=order, before=before))

    def delete(self, node: cst.CSTNode) -> None:
        """Delete the small statement that holds `node`, its line too where it stands alone there."""
        statement = self.module.statement(node)
        if statement in self.deleted:
            return
        line = self.module.line(statement)
        self.deleted.append(statement)
        if isinstance(statement, cst.BaseSmallStatement) and len(line.body) > 1:  # type: ignore[attr-defined]
            smalls = list(line.body)  # type: ignore[attr-defined]
            index = smalls.index(statement)
            if index + 1 < len(smalls):
                span = Span(self.module.span(statement).start, self.module.span(smalls[index + 1]).start)
            else:
                span = Span(self.module.span(smalls[index - 1]).stop, self.module.span(statement).stop)
            self.replace_span(span)
        elif isinstance(line, cst.SimpleStatementSuite):
            self.replace(statement, "pass")
        else:
            span, text = self.module.lines(line), self.module.text
            blank_above = span.start == 0 or not text.line(span.start - 1).strip()
            if blank_above and span.stop < len(text.content) and not text.line(span.stop).strip():
                # One blank line is enough where nothing stands. It is an edit of its own: others insert before it.
                self.replace_span(Span(span.stop, text.line_end(span.stop)))
            self.replace_span(span)

    def move_after(self, nodes: list[cst.CSTNode], anchor: cst.CSTNode, order: int) -> None:
        """Move whole lines (and the comments directly above them) behind another line of the same block."""
        at = self.module.lines(self.module.line(anchor)).stop
        content = self.module.text.content
        lead: tuple[Piece, ...] = (self.module.text.newline,) if content[at - 1 : at] not in ("\n", "\r") else ()
        pieces: list[Piece] = []
        for node in nodes:
            line = self.module.line(node)
            comments, lines = self.module.comments_above(line), self.module.lines(line)
            span = Span(comments.start, lines.stop)
            self.edits.append(Edit(span, (), moved=True))
            pieces.append(span)
            self.deleted.append(line)
        self.edits.append(Edit(Span(at, at), (*lead, *pieces), order=order, before=False))

    # -- imports, names, reports ---------------------------------------------------------------------------------

    def need(self, module: str, name: str) -> str:
        """The local name under which `from module import name` is (or will be) known at module level."""
        key = (module, name)
        if key not in self.needs:
            known = self.bound_import(f"{module}.{name}")
            if known is None:
                known = name if not self.taken(name) else self.fresh(f"torch_{name}")
                self._taken.add(known)
            self.needs[key] = known
        return self.needs[key]

    def need_module(self, module: str, alias: str = "") -> str:
        """The spelling under which a module is (or will be) known at module level: `torch`, `dist`."""
        key = (module, "")
        if key not in self.needs:
            known = self.bound_import(module)
            if known is None:
                known = alias or module
                mine = alias in self._taken or alias in self.module.names
                if alias and mine and not self._goes(alias, module):
                    known = self.fresh(alias)
                self._taken.add(known)
            self.needs[key] = known
        return self.needs[key]

    def _goes(self, alias: str, module: str) -> bool:
        """Whether a name is only bound by imports of DeepSpeed's double of a module, whose uses all change over."""
        doubles = {"torch.distributed": ("deepspeed.comm", "deepspeed.comm.comm")}.get(module, ())
        kept = any(wrap.source == "deepspeed" and wrap.plan.refused for wrap in self.all_wraps)
        return not kept and any(self.bound_import(one) == alias for one in doubles)

    def bound_import(self, full: str) -> str | None:
        """The name that a module-level import of this module binds to an API, if there is one."""
        for statement in self.module.tree.body:
            for small in getattr(statement, "body", ()) if isinstance(statement, cst.SimpleStatementLine) else ():
                if isinstance(small, cst.Import):
                    for alias in small.names:
                        if get_full_name_for_node(alias.name) == full:
                            return get_full_name_for_node(alias.asname.name) if alias.asname else full
                elif isinstance(small, cst.ImportFrom) and not isinstance(small.names, cst.ImportStar):
                    base = get_full_name_for_node(small.module) if small.module and not small.relative else None
                    for alias in small.names:
                        if base and f"{base}.{get_full_name_for_node(alias.name)}" == full:
                            local = alias.asname.name if alias.asname else alias.name
                            return get_full_name_for_node(local)
        return None

    def taken(self, name: str) -> bool:
        """Whether the module uses a name anywhere, or it was handed out."""
        return name in self._taken or name in self.module.names

    def fresh(self, *wishes: str) -> str:
        """A name that the module does not use: the first free wish, else one with a number."""
        for wish in wishes:
            if not self.taken(wish):
                self._taken.add(wish)
                return wish
        number = 2
        while self.taken(f"{wishes[0]}_{number}"):
            number += 1
        name = f"{wishes[0]}_{number}"
        self._taken.add(name)
        return name

    def throwaway(self, *wishes: str, value: str = "") -> str:
        """A free name for a loop variable or a value; equal wishes (and values) get one name throughout a module."""
        key = (*wishes, value)
        if key not in self._throwaways:
            self._throwaways[key] = self.fresh(*wishes)
        return self._throwaways[key]

    def note(self, node: cst.CSTNode, grade: Grade, message: str, rule: str = "") -> None:
        """Report an edit at a node."""
        line, column = self.module.text.place(self.module.span(node).start)
        message = " ".join(message.split())
        finding = Finding(self.module.path, line, column, grade, rule or self.rule, message)
        if finding not in self.findings:
            self.findings.append(finding)

    def todo(self, node: cst.CSTNode, message: str, rule: str = "") -> None:
        """Leave something for a person: a `# TODO(ckptkit)` line above it (once, whatever the run) and a finding."""
        message = " ".join(message.split())
        self.note(node, Grade.MANUAL, message, rule)
        try:
            self.left.add(id(self.module.statement(node)))
            line = self.module.line(node)
        except LookupError:
            return
        above = self.module.comments_above(line)
        known = _CONTINUED.sub(" ", self.module.text.content[above.start : above.stop])
        text = TODO + message
        place = (self.module.lines(line).start, text)
        if text in known or place in self._said:
            return
        self._said.add(place)
        if isinstance(line, cst.SimpleStatementSuite):
            line = next(a for a in self.module.ancestors(line) if isinstance(a, cst.BaseCompoundStatement))
        room = max(LIMIT - len(self.module.indent(line).expandtabs(4)), 60)
        broken = textwrap.wrap(text, room, subsequent_indent=MORE, break_long_words=False, break_on_hyphens=False)
        self.before(line, *((one,) for one in broken), order=-1)

    def rendering(self) -> Rendering:
        """The edits so far, ready to be applied."""
        return Rendering(self.module.text.content, list(self.edits))
