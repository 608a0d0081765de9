"""`release`: values of a `forward` that nothing needs any more are dropped where they die."""

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

# The batch that is counted with, where the tool makes it up.
ROWS, TOKENS = 8, 1024
# A row is also counted at this share of its length: which part of a layer holds most depends on it.
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
    """Drop values where they die, in the selected modules' `forward` and what that calls.

    A local name keeps its value until the function returns or binds the name anew. Where the value
    is not needed so long, and nothing else keeps it, it is dropped right behind the statement that
    reads it last. Before that, plain statements that do not need one another are put in the order
    in which a call holds least; what draws random numbers, changes something or is not known keeps
    its place, and what reads the same value its order, in which gradients are added up.

    Only what lowers the most that a call holds is written. That is measured on the meta device, in
    training and in eval mode without gradients, at the length of `inputs(model)` or at `sequence`
    tokens a row, and at an eighth of them. Without gradients, and where `checkpoint` runs a part
    for the first time, names keep far more than in training, where autograd keeps most of it
    anyway. What the caller holds, arguments among it, is not dropped, nor what stands in a `try`,
    a generator, a function inside. Call it after what changes the source.

    Rewrite:
        y = x + mixed
        z = self.down(torch.relu(self.up(y)))
        -->
        y = x + mixed
        del mixed
        z = self.down(torch.relu(self.up(y)))
        and where one line binds a name and the next one is all that reads it,
        y = x + self.mix(x)

    Shapes: Unchanged.
    Numerics: Exact.
    State: Unchanged.

    Raises:
        SR305 modules of other files alone, a model that does not run without values, modules of
        the class that are not selected; SR206 a length that is none.

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
        """The functions that the modules run, with what pays dropped."""
        from slapo_rewrite.model.held_memory import CannotMeasure  # imports triton

        sequence = call.arguments["sequence"]
        if sequence is not None and sequence < 1:
            raise errors.BadArgument(f"`sequence` is how many tokens a row has, not {sequence!r}")
        sharing = Sharing(call.tree, call.sources)
        lives = _lives(call, nodes, sharing)
        found = {d: each.function for each in lives for d in deaths(sharing.file, each.function)}
        try:
            given = _inputs(call, sequence)
            if (order := _order(call, nodes, lives, sharing, given)) is not None:
                # What is dropped then is told by the function as it stands then.
                edits = _reordering(sharing.file, order, call.directive)
                return Rewrite(edits, again=True)
            dropped = _paying(call, lives, found, given)
        except (CannotMeasure, ValueError) as error:
            raise errors.Unsupported(
                f"what is held cannot be measured: {error}",
                hint="leave `release` out: it needs a model that runs on the meta device, and "
                "inputs for it",
            ) from error
        _check_selected(nodes, sharing, {found[death]: death for death in dropped})
        if not dropped:
            return Rewrite([], warnings=(_unchanged(call.directive),))
        functions = {death: found[death] for death in dropped}
        return Rewrite(_edits(sharing.file, functions, call.directive))


def _unchanged(cause: Directive) -> str:
    line = f"line {cause.at.line}: " if cause.at else ""
    return f"{line}`release` drops nothing: no name keeps what would lower the memory that is held"


def _lives(call: Call, nodes: Sequence[Node], sharing: Sharing) -> list[Live]:
    """The functions of the file that some modules run, constructors left out."""
    selected = {node.path for node in below(nodes)}
    functions = [f for f in sharing.functions() if f.name != "__init__"]
    own = [f for f in functions if any(n.path in selected for n in sharing.sharers(f))]
    if not own:
        name = nodes[0].cls.__name__
        raise errors.Unsupported(
            f"`{nodes[0].path}` is a {name}: its `forward` does not stand in "
            f"{sharing.file.path.name}",
            hint=own_copy(name, sharing.file),
        )
    return live_functions(call.tree, sharing.file, [(f, sharing.owner_of(f)) for f in own])


def _inputs(call: Call, sequence: int | None) -> list[dict[str, Any]]:
    """The arguments of the model at each length that counts; `ValueError` if there are none."""
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
    """A better order of statements of a function that the selected modules alone run."""
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
    """The names that are worth dropping."""
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
    """One text serves all modules that run it."""
    selected = {node.path for node in below(nodes)}
    for function, death in functions.items():
        others = [node for node in sharing.sharers(function) if node.path not in selected]
        if others:
            raise errors.Unsupported(
                f"`{others[0].path or 'the model'}` runs `{function.name}` too, where "
                f"`{death.name}` is to be dropped, and is not selected",
                at=sharing.file.at(death.statement),
                hint="select all modules that run it, or the whole model: s.release()",
            )


def _reordering(file: SourceFile, order: Order, cause: Directive) -> list[TextEdit]:
    """Statements written in the places of one another."""
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
    """Each name written as its expression where it reads well, else in a `del`."""
    lines: dict[ast.stmt, Lines] = {}
    names: dict[ast.stmt, list[str]] = {}
    behind = {death.statement for death in dropped}
    for death, function in dropped.items():
        place = in_place(file, function, death.statement, death.name)
        # Of one statement, one name is written out; one that others die behind stays.
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
        why = (
            f"nothing needs {quoted} any more, and {'they hold' if several else 'it holds'} memory"
        )
        line = Line(f"del {', '.join(dead)}", (cause,), why)
        lines.setdefault(statement, Lines()).after.append(line)
    return written(file, lines)
