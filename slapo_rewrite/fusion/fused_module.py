"""Packs several linear layers into one: a subclass with the new layer, and its call."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.class_writer import ClassWriter, Subclass
from slapo_rewrite.changes.output_files import OutputFiles
from slapo_rewrite.changes.replace_statement import ReplaceStatement
from slapo_rewrite.changes.source_rewrite import NewClass, Rewrite
from slapo_rewrite.code.arguments import arguments_by, parameters, values_given
from slapo_rewrite.code.build import parenthesised
from slapo_rewrite.code.dataflow import names_in, parameters_in, uses_of
from slapo_rewrite.code.edit import Edit, Put
from slapo_rewrite.code.lines import Line, Lines
from slapo_rewrite.code.names import is_name, unique
from slapo_rewrite.code.runs import behind
from slapo_rewrite.code.splice import Edit as TextEdit
from slapo_rewrite.code.syntax import end_position, position
from slapo_rewrite.code.text import joined_path, listed, with_article
from slapo_rewrite.fusion.engine import Engine
from slapo_rewrite.model.join import find_site
from slapo_rewrite.model.sources import Sources
from slapo_rewrite.model.tree import Node
from slapo_rewrite.model.uncalled import check_uncalled
from slapo_rewrite.patterns.search import Match
from slapo_rewrite.runtime.weights import Weight, concat


@dataclass(frozen=True)
class Held:
    """The new module of a subclass."""

    name: str  # its attribute name
    made: str  # the expression that constructs it
    left: tuple[str, ...]  # the submodules that it replaces
    before: tuple[str, ...] = ()  # statements of the constructor that still need these


@dataclass(frozen=True)
class Packed:
    """The module that replaces several calls on one operand."""

    name: str  # its attribute name
    origin: str = "torch.nn.Linear"  # the dotted name of its class
    # The source of its arguments; None to derive them from the replaced layers.
    arguments: str | None = None
    # How its tensors are made; None for the concatenation of the replaced layers' tensors.
    weights: Mapping[str, Weight] | None = None


def packed(engine: Engine, groups: Iterable[tuple[Packed, Sequence[Match]]]) -> Rewrite:
    """The rewrite with subclasses that replace several calls on one operand by one module."""
    edits: list[TextEdit] = []
    classes: dict[str, NewClass] = {}
    made: dict[type, tuple[str, tuple[object, ...]]] = {}
    for new, group in groups:
        node = engine.tree.nodes[group[0].path]
        lives = _linears(engine, node, group)
        how = (
            *(id(m.replaced.node) for m in group),
            *(getattr(live, "bias", None) is None for live in lives),
        )
        if node.cls not in made:
            _check_unread(engine, node, group)
            new_name = unique(f"Packed{node.cls.__name__}", engine.file.names.__contains__)
            made[node.cls] = (new_name, how)
            edits.append(_subclass(engine, node, group, new, new_name))
        elif made[node.cls][1] != how:
            raise errors.Unsupported(
                f"modules of class `{node.cls.__name__}` call different submodules"
            )
        weights = new.weights or {
            f"{new.name}.{tensor}": concat(*(f"{match.root.called}.{tensor}" for match in group))
            for tensor, _ in lives[0].named_parameters()
        }
        classes[node.path] = NewClass(made[node.cls][0], tuple(weights.items()))
    return Rewrite(edits, tuple(engine.speller.references.values()), classes=classes)


def _linears(engine: Engine, node: Node, group: Sequence[Match]) -> list[Any]:
    """The live layers of the calls; raises if they are not linear layers of one module."""
    paths = [str(match.root.called) for match in group]
    lives = [engine.tree.nodes[joined_path(node.path, p)].live for p in paths]
    pairs = zip(paths, lives, strict=True)
    if any("." in path or not hasattr(live, "out_features") for path, live in pairs):
        raise errors.Unsupported(
            f"{listed(paths)} are not linear layers of one module: the order of their packed "
            "results is not known",
            at=group[0].place,
        )
    for path, live in zip(paths, lives, strict=True):
        check_uncalled(joined_path(node.path, path), live)
    return lives


def _check_unread(engine: Engine, node: Node, group: Sequence[Match]) -> None:
    """Raises if another method or function of the file reads a layer to be removed."""
    left = {str(match.root.called) for match in group}
    calls = {id(match.replaced.node) for match in group}
    own = {cls.__name__ for cls in node.cls.__mro__}
    for function in engine.sharing.functions():
        owner = engine.sharing.owner_of(function)
        named = names_in(function)
        inside, outside = owner in own and function.name != "__init__", bool(named & own)
        called = {
            id(n.func) for n in ast.walk(function) if isinstance(n, ast.Call) and id(n) in calls
        }
        for read in ast.walk(function):
            match read:
                case ast.Attribute(ast.Name(of), name) if name in left and id(read) not in called:
                    is_read = inside if of == "self" else outside
                case ast.Constant(str(name)) if name in left:
                    of, is_read = "self", inside
                case _:
                    continue
            if is_read:
                raise errors.Unsupported(
                    f"`{of}.{name}` is read here, so it cannot be replaced",
                    at=engine.file.at(read),
                )


def _subclass(
    engine: Engine, node: Node, group: Sequence[Match], new: Packed, new_name: str
) -> TextEdit:
    """The edit that inserts the subclass for the modules of one class."""
    left, name = tuple(str(match.root.called) for match in group), new.name
    if hasattr(node.live, name):
        raise errors.NameTaken(f"`{node.cls.__name__}` already has a `{name}`")
    made = [_Made.read(engine.sources, node, each) for each in left]
    arguments, before, sizes = new.arguments, tuple[str, ...](), None
    equal = len({node.children[each].live.out_features for each in left}) == 1
    if not equal or len({each.width for each in made}) > 1:
        sizes = [f"{each.removesuffix('_proj')}_size" for each in left]
        pairs = zip(sizes, made, strict=True)
        before = tuple(f"self.{size} = {each.width}" for size, each in pairs)
    if arguments is None:
        product = isinstance(ast.parse(made[0].width, mode="eval").body, ast.BinOp)
        product = product and "+" not in made[0].width and "-" not in made[0].width
        width = made[0].width if product else parenthesised(made[0].width)
        total = f"{len(left)} * {width}"
        if sizes is not None:
            total = " + ".join(f"self.{size}" for size in sizes)
        arguments = f"{made[0].inputs}, {total}{made[0].bias}"
    cls = engine.speller(new.origin)
    held = Held(name, f"{cls}({arguments})", left, before)
    changes = _side_by_side(engine, group, name, sizes)
    doc = f"{with_article(node.cls.__name__)} with {listed(left)} in one `{name}`."
    return _holding(engine, node, held, changes, new_name, doc)


@dataclass(frozen=True)
class _Made:
    """The constructor arguments of a linear layer."""

    inputs: str  # the source of its `in_features`
    width: str  # the source of its `out_features`
    bias: str  # the `bias` argument with a comma before it; empty for the default

    @staticmethod
    def read(sources: Sources, node: Node, name: str) -> _Made:
        """The arguments as the constructor writes them, if a subclass can repeat them."""
        site, live = find_site(sources, node.children[name]), node.children[name].live
        given: dict[str, ast.expr] = {}
        if isinstance(site.call, ast.Call):
            given = arguments_by(site.call, "in_features", "out_features", "bias")
        constructor = site.file.method(site.class_name, "__init__")
        own = parameters(constructor) if constructor is not None else []
        known = {*own, *site.file.names}

        def text(argument: str, otherwise: str) -> str:
            expression = given.get(argument)
            if expression is None or not names_in(expression) <= known:
                return otherwise
            return site.file.segment(expression)

        bias = "" if live.bias is not None else ", bias=False"
        if "bias" in given:
            bias = f", bias={text('bias', str(live.bias is not None))}"
        return _Made(
            text("in_features", f"self.{name}.in_features"),
            text("out_features", f"self.{name}.out_features"),
            bias,
        )


def _holding(
    engine: Engine,
    node: Node,
    held: Held,
    changes: Mapping[ast.stmt, ReplaceStatement],
    new_name: str,
    doc: str,
) -> TextEdit:
    """The edit that inserts a subclass which constructs the new module, with these changes."""
    file, cause = engine.file, engine.cause
    files = OutputFiles(engine.tree, engine.sources)
    writer = ClassWriter(files.main.classes, files.main.imports)
    name = node.cls.__name__
    constructor = files.main.classes.method(name, "__init__")
    if constructor is None or files.of(node.cls) is not files.main:
        raise errors.Unsupported(
            f"`{name}` has no constructor in {file.path.name}, so it cannot hold `{held.name}`",
            at=cause.at,
        )
    lines: dict[ast.stmt, Lines] = {}
    for change in changes.values():
        change.add_to(lines.setdefault(change.statement, Lines()), (cause,))
    made = f"self.{held.name} = {held.made}"
    deleted = f"del {', '.join(f'self.{each}' for each in held.left)}" if held.left else ""
    for text in (*held.before, made, deleted):
        if text:
            end = lines.setdefault(constructor.body[-1], Lines())
            end.after.append(Line(text, (cause,), f"`{held.name}`"))
    text = writer.text_of(Subclass(name, new_name, doc), lines)
    engine.speller.references.update(files.main.imports.references)
    return behind(file, file.classes[name], text, 2).caused_by((cause,), f"`{new_name}`")


def _side_by_side(
    engine: Engine, group: Sequence[Match], name: str, sizes: Sequence[str] | None
) -> dict[ast.stmt, ReplaceStatement]:
    """Replaces several calls on one operand by one.

    `q = self.q(x).view(...)  ->  q, k, v = self.qkv(x).chunk(3, dim=-1); q = q.view(...)`

    The module `name` returns all results, concatenated along the last axis. `sizes` are attributes
    with their lengths, or None if all are equal.
    """
    first = group[0]
    statements = [engine.file.statement_of(match.replaced.node) for match in group]
    function = engine.sharing.function_of(statements[0])
    for match, statement in zip(group, statements, strict=True):
        if match.root.regions != first.root.regions or hasattr(statement, "body"):
            raise errors.NoMatch(
                "these calls are in different branches, so one call cannot replace them",
                at=first.place,
                also=[match.place],
            )
    names = [_bound(function, statements, number, group) for number in range(len(group))]
    operand = _operand(engine, first)
    cut = f"split([{', '.join(f'self.{s}' for s in sizes)}], dim=-1)" if sizes else ""
    cut = cut or f"chunk({len(group)}, dim=-1)"
    call = f"{', '.join(names)} = self.{name}({operand}).{cut}"
    changes: dict[ast.stmt, ReplaceStatement] = {}
    for number, (match, statement) in enumerate(zip(group, statements, strict=True)):
        whole = (
            isinstance(statement, ast.Assign)
            and statement.value is match.replaced.node
            and is_name(statement.targets[0], names[number])
        )
        node, text = (statement, call) if whole else (match.replaced.node, names[number])
        assert isinstance(node, ast.expr | ast.stmt)
        change = ReplaceStatement(
            statement,
            name,
            (Edit(node, Put(text)),),
            before=() if number or whole else (call,),
            gone=whole and number > 0,
            moved=number == 0,
        )
        known = changes.get(statement)
        changes[statement] = known.joined(change) if known else change
    return changes


def _operand(engine: Engine, match: Match) -> str:
    """The text of a call's operand."""
    node = match.replaced.node
    given = values_given(node) if isinstance(node, ast.Call) else []
    if len(given) == 1:
        return engine.file.segment(given[0])
    return next(iter(match.operands.values()))


def _bound(
    function: ast.FunctionDef, statements: Sequence[ast.stmt], number: int, group: Sequence[Match]
) -> str:
    """The local name for one of several results: its target, or from the name of the submodule."""
    statement = statements[number]
    if isinstance(statement, ast.Assign) and statements.count(statement) == 1:
        target = statement.targets[0]
        if len(statement.targets) == 1 and isinstance(target, ast.Name):
            first, last = position(statements[0]), end_position(statement)
            others = [n for n in uses_of(function, target.id) if n is not target]
            if not any(first <= position(n) < last for n in others):
                return target.id
    leaf = (group[number].root.called or "").rpartition(".")[2]
    stem = leaf.removesuffix("_proj") or leaf
    taken = names_in(function) | parameters_in(function)
    return next(n for n in (stem, leaf, f"{leaf}_output", f"{leaf}_result") if n not in taken)
