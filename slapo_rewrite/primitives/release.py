"""`release`: deletes local variables of `forward` where they are dead."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slapo_rewrite import errors
from slapo_rewrite.changes.change_set import own_copy
from slapo_rewrite.changes.source_rewrite import Rewrite
from slapo_rewrite.code.dead_values import Death, deaths
from slapo_rewrite.code.edit import Edit, Put
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.in_place import in_place
from slapo_rewrite.code.lines import Line, Lines, written
from slapo_rewrite.code.splice import Edit as TextEdit
from slapo_rewrite.code.text import listed
from slapo_rewrite.directive import Directive
from slapo_rewrite.examples import Sample
from slapo_rewrite.fusion.match_rules import below
from slapo_rewrite.fusion.method_users import Sharing
from slapo_rewrite.model.tree import Node
from slapo_rewrite.model.watched_functions import Live, live_functions
from slapo_rewrite.primitives.base import Call, Rewriting
from slapo_rewrite.primitives.checkpoint import MODEL

if TYPE_CHECKING:
    from slapo_rewrite.model.paying_orders import Order

# The size of the batch, if the tool makes the inputs.
ROWS, TOKENS = 8, 1024
# Rows are also counted at this share of their length, on which the peak of a layer depends.
SHORTER = 8

BLOCK = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        mixed = self.mix(x)
        y = x + mixed
        z = self.down(torch.relu(self.up(y)))
        return y + z


class Stack(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])

    def forward(self, x):
        lifted = x * 2
        # Both signs, side by side.
        signs = torch.stack([lifted, -lifted])
        for block in self.blocks:
            signs = block(signs)
        return signs
"""
SAMPLE = Sample(BLOCK, MODEL)


class Release(Rewriting):
    """Delete dead local variables, in the selected modules' `forward` and the functions it calls.

    A local variable keeps its value alive until the function returns or rebinds it. If the value is
    dead earlier, and nothing else keeps it alive, the variable is deleted right after its last use.
    Before that, simple independent statements are put in the order with the lowest peak memory.
    Statements that are random, have side effects or are not known keep their place; those that read
    the same value keep their order, which is the order of accumulating gradients.

    Only changes that lower the peak memory of a call are written. Peaks are measured on the meta
    device, in training and in eval mode without gradients, at the length of `inputs(model)` or at
    `sequence` tokens per row, and at an eighth of it. Without gradients, and in the first run of a
    `checkpoint`, variables keep far more alive than in training, where autograd keeps most values
    anyway. Values that the caller holds, such as arguments, are not deleted, nor are variables in
    `try`, generators or inner functions. Call it after all changes of the source.

    Rewrite:
        y = x + mixed
        z = self.down(torch.relu(self.up(y)))
        -->
        y = x + mixed
        del mixed
        z = self.down(torch.relu(self.up(y)))
        and if only the line after an assignment reads the variable,
        y = x + self.mix(x)

    Shapes: Unchanged.
    Numerics: Exact.
    State: Unchanged.

    Raises:
        SR305 only modules of other files, a model that does not run on the meta device, modules of
        the class that are not selected; SR206 an invalid length.

    Source: ROAM, arXiv 2310.19295.
    """

    name = "release"
    examples = (
        SAMPLE.example(
            "s.release()",
            """\
-        mixed = self.mix(x)
-        y = x + mixed
+        y = x + self.mix(x)
+        del lifted
""",
        ),
    )
    refusals = (
        SAMPLE.refused("SR305", 's["blocks.0"].release()'),
        SAMPLE.refused("SR305", 's["blocks.*.up"].release()'),
        SAMPLE.refused("SR206", "s.release(sequence=0)"),
    )

    @staticmethod
    def takes(*, sequence: int | None = None) -> None:
        """`release(*, sequence=None)`."""

    def rewrites(self, call: Call, nodes: list[Node]) -> Rewrite:
        """The edits of the functions that the modules run, as far as they save memory."""
        from slapo_rewrite.model.held_memory import CannotMeasure  # imports triton

        sequence = call.arguments["sequence"]
        if sequence is not None and sequence < 1:
            raise errors.BadArgument(f"`sequence` is a number of tokens, not {sequence!r}")
        sharing = Sharing(call.tree, call.sources)
        lives = _lives(call, nodes, sharing)
        found = {d: each.function for each in lives for d in deaths(sharing.file, each.function)}
        try:
            given = _inputs(call, sequence)
            if (order := _order(call, nodes, lives, sharing, given)) is not None:
                # Deletions are chosen in the next round, for the reordered function.
                edits = _reordering(sharing.file, order, call.directive)
                return Rewrite(edits, again=True)
            dropped = _paying(call, lives, found, given)
        except (CannotMeasure, ValueError) as error:
            raise errors.Unsupported(
                f"the memory that names hold cannot be measured: {error}",
                hint="remove `release`: it needs a model that runs on the meta device, and inputs "
                "for it",
            ) from error
        _check_selected(nodes, sharing, {found[death]: death for death in dropped})
        if not dropped:
            return Rewrite([], warnings=(_unchanged(call.directive),))
        functions = {death: found[death] for death in dropped}
        return Rewrite(_edits(sharing.file, functions, call.directive))


def _unchanged(cause: Directive) -> str:
    line = f"line {cause.at.line}: " if cause.at else ""
    return f"{line}`release` drops nothing: no name holds memory that could be freed"


def _lives(call: Call, nodes: Sequence[Node], sharing: Sharing) -> list[Live]:
    """The functions of the file that some modules run, without constructors."""
    selected = {node.path for node in below(nodes)}
    functions = [f for f in sharing.functions() if f.name != "__init__"]
    own = [f for f in functions if any(n.path in selected for n in sharing.sharers(f))]
    if not own:
        name = nodes[0].cls.__name__
        raise errors.Unsupported(
            f"`{nodes[0].path}` is a {name}: its `forward` is not in {sharing.file.path.name}",
            hint=own_copy(name, sharing.file),
        )
    return live_functions(call.tree, sharing.file, [(f, sharing.owner_of(f)) for f in own])


def _inputs(call: Call, sequence: int | None) -> list[dict[str, Any]]:
    """The arguments of the model at each measured length; `ValueError` if there are none."""
    from slapo_rewrite.model.sized_inputs import positions_of, sized_inputs

    model = call.tree.root.live
    rows = None if hasattr(call.schedule, "inputs") else ROWS
    if sequence is None and rows is not None:
        sequence = min(TOKENS, positions_of(model) or TOKENS)
    lengths = [sequence, *([sequence // SHORTER] if sequence and sequence >= 2 * SHORTER else [])]
    return [sized_inputs(call.schedule, model, rows, length) for length in lengths]


def _order(
    call: Call,
    nodes: Sequence[Node],
    lives: Sequence[Live],
    sharing: Sharing,
    given: Sequence[Mapping[str, Any]],
) -> Order | None:
    """A better order of statements in a function that only selected modules run; or None."""
    from slapo_rewrite.model.paying_orders import paying_order  # imports triton

    selected = {node.path for node in below(nodes)}
    own = [
        live
        for live in lives
        if all(node.path in selected for node in sharing.sharers(live.function))
    ]
    return paying_order(call.tree, sharing.file, own, sharing.sharers, given)


def _paying(
    call: Call,
    lives: Sequence[Live],
    found: Mapping[Death, ast.FunctionDef],
    given: Sequence[Mapping[str, Any]],
) -> list[Death]:
    """The variables that are worth deleting."""
    from slapo_rewrite.model.paying_releases import measured, paying  # imports triton

    ways = [
        way
        for inputs in given
        for way in measured(call.tree, inputs, call.sources.main, lives, list(found))
    ]
    return paying(ways, found)


def _check_selected(
    nodes: Sequence[Node], sharing: Sharing, functions: Mapping[ast.FunctionDef, Death]
) -> None:
    """Refuses deletions in functions that modules which are not selected run as well."""
    selected = {node.path for node in below(nodes)}
    for function, death in functions.items():
        others = [node for node in sharing.sharers(function) if node.path not in selected]
        if others:
            raise errors.Unsupported(
                f"`{others[0].path or 'the model'}` also runs `{function.name}`, where "
                f"`{death.name}` would be dropped, but is not selected",
                at=sharing.file.at(death.statement),
                hint="select all modules that run it, or the whole model: s.release()",
            )


def _reordering(file: SourceFile, order: Order, cause: Directive) -> list[TextEdit]:
    """The edits that reorder statements."""
    lines: dict[ast.stmt, Lines] = {}
    why = "independent statements, in the order in which least is held"
    for place, statement in zip(order.run, order.order, strict=True):
        if place is not statement:
            edit = Edit(place, Put(file.segment(statement)))
            lines[place] = Lines(inside=[(edit, (cause,), why)])
    return written(file, lines)


def _edits(
    file: SourceFile, dropped: Mapping[Death, ast.FunctionDef], cause: Directive
) -> list[TextEdit]:
    """The edits that replace variables by their expression, if short enough, or delete them."""
    lines: dict[ast.stmt, Lines] = {}
    names: dict[ast.stmt, list[str]] = {}
    behind = {death.statement for death in dropped}
    for death, function in dropped.items():
        place = in_place(file, function, death.statement, death.name)
        # One variable per statement is replaced; an assignment followed by deletions stays.
        if place is None or place.gone in behind or death.statement in lines:
            names.setdefault(death.statement, []).append(death.name)
            continue
        why = f"the value that was `{death.name}` is let go once it is used"
        edit = Edit(place.name, Put(place.text))
        lines.setdefault(death.statement, Lines()).inside.append((edit, (cause,), why))
        lines[place.gone] = Lines(gone=((cause,), why))
    for statement, dead in names.items():
        several = len(dead) > 1
        quoted = listed(dead)
        why = f"nothing more needs {quoted}, but {'they hold' if several else 'it holds'} memory"
        line = Line(f"del {', '.join(dead)}", (cause,), why)
        lines.setdefault(statement, Lines()).after.append(line)
    return written(file, lines)
