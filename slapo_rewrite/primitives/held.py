"""`replace` with a pattern and a module class: the module is made, and called in its place."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.edit.expressions import parenthesised
from slapo_rewrite.edit.rewritten import NewClass, Rewrite
from slapo_rewrite.edit.splice import Edit
from slapo_rewrite.edit.state import Function, ModuleState
from slapo_rewrite.fusion.engine import Engine
from slapo_rewrite.fusion.packed import Held, side_by_side, subclass
from slapo_rewrite.fusion.spelling import SCHEDULE
from slapo_rewrite.model.join import find_site
from slapo_rewrite.model.tree import Node
from slapo_rewrite.patterns.search import Match, Matches
from slapo_rewrite.primitives.base import Call
from slapo_rewrite.runtime.weights import Weight, concat, weight_of


def in_place_of(
    call: Call,
    matches: Matches,
    target: Function,
    states: Mapping[str, ModuleState],
    line_length: int,
) -> Rewrite:
    """Subclasses that hold one module in the place of several calls on one operand.

    Raises:
        NoMatch: The calls do not stand side by side.
        BadArgument: What the module is made with is not known.
    """
    at, name = call.directive.at, module_name(call)
    engine = Engine(call.tree, call.sources, states, call.directive, line_length)
    groups: dict[str, list[tuple[Match, ...]]] = {}
    for group in matches.groups:
        groups.setdefault(group[0].path, []).append(group)
    alone = [m for m in matches if not any(m in g for g in groups.get(m.path, ()))]
    if alone or any(len(g) > 1 for g in groups.values()):
        wrong = alone[0] if alone else next(g for g in groups.values() if len(g) > 1)[1][0]
        raise errors.NoMatch(
            "this call stands beside no other on the same operand"
            if alone
            else "there are calls side by side in several places",
            at=wrong.place,
            also=[at] if at else [],
            hint="let the expression match the calls that one module is to take the place of",
        )
    edits: list[Edit] = []
    classes: dict[str, NewClass] = {}
    made: dict[type, tuple[str, tuple[int, ...]]] = {}
    for path, (group,) in groups.items():
        node = call.tree.nodes[path]
        places = tuple(id(m.replaced.node) for m in group)
        if node.cls not in made:
            new_name = _free(f"Packed{node.cls.__name__}", engine)
            made[node.cls] = (new_name, places)
            edits.append(_packed(call, engine, node, group, target, name, new_name))
        elif made[node.cls][1] != places:
            raise errors.Unsupported(
                f"modules of class `{node.cls.__name__}` call different submodules", at=at
            )
        packs = tuple(str(match.root.called) for match in group)
        classes[path] = NewClass(made[node.cls][0], packs)
    return Rewrite(edits, tuple(engine.speller.references.values()), classes=classes)


def _packed(
    call: Call,
    engine: Engine,
    node: Node,
    group: Sequence[Match],
    target: Function,
    name: str,
    new_name: str,
) -> Edit:
    """The subclass for the modules of one class."""
    left = tuple(str(match.root.called) for match in group)
    lives = [engine.tree.nodes[f"{node.path}.{each}" if node.path else each].live for each in left]
    if hasattr(node.live, name):
        raise errors.NameTaken(
            f"`{node.cls.__name__}` has a `{name}` already", at=call.directive.at
        )
    if any(
        "." in each or not hasattr(live, "out_features")
        for each, live in zip(left, lives, strict=True)
    ):
        raise errors.Unsupported(
            f"{_listed(left)} are not linear layers of one module: how their results are packed "
            "is not known",
            at=group[0].place,
            also=[call.directive.at] if call.directive.at else [],
        )
    made = [_Made.read(call, node, each) for each in left]
    arguments, before, sizes = call.arguments["args"], tuple[str, ...](), None
    equal = len({live.out_features for live in lives}) == 1
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
    cls = engine.speller(dotted(target))
    held = Held(name, f"{cls}({arguments})", left, before)
    edits = side_by_side(engine, group, name, sizes)
    doc = f"A `{node.cls.__name__}` with {_listed(left)} in one `{name}`."
    return subclass(engine, node, held, edits, new_name, doc)


@dataclass(frozen=True)
class _Made:
    """How a linear layer is made.

    Attributes:
        inputs: Its `in_features`, as source.
        width: Its `out_features`.
        bias: What says that it has none, with a comma before; empty where it has one.
    """

    inputs: str
    width: str
    bias: str

    @staticmethod
    def read(call: Call, node: Node, name: str) -> _Made:
        """The arguments as the constructor writes them, where a subclass can write them again."""
        site, live = find_site(call.sources, node.children[name]), node.children[name].live
        given: dict[str, ast.expr] = {}
        if isinstance(site.value, ast.Call):
            given = dict(
                zip(("in_features", "out_features", "bias"), site.value.args, strict=False)
            )
            given |= {k.arg: k.value for k in site.value.keywords if k.arg}
        constructor = site.file.method(site.class_name, "__init__")
        own = [a.arg for a in constructor.args.args] if constructor is not None else []
        known = {*own, *site.file.names}

        def text(argument: str, otherwise: str) -> str:
            expression = given.get(argument)
            names = (
                [n for n in ast.walk(expression) if isinstance(n, ast.Name)] if expression else []
            )
            if expression is None or not all(n.id in known for n in names):
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


def weights_beside(call: Call, node: Node) -> dict[str, Weight]:
    """What the tensors of the new module are made of, by their names in the new class."""
    given, name = call.arguments["weights"], module_name(call)
    if given is not None:
        return {f"{name}.{n}": weight_of(w) for n, w in given.items()}
    assert call.done is not None
    left = call.done.classes[node.path].packs
    tensors = [n for n, _ in node.children[left[0]].live.named_parameters()]
    return {f"{name}.{n}": concat(*(f"{each}.{n}" for each in left)) for n in tensors}


def class_of(call: Call, node: Node) -> Any:
    """The new class, as the rewritten source defines it."""
    assert call.done is not None
    return inspect.unwrap(node.cls.__init__).__globals__[call.done.classes[node.path].name]


def module_name(call: Call) -> str:
    """What the new module is called: as given, or its class's name in small letters."""
    given = call.arguments["name"]
    if given is None:
        given = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", call.arguments["new_mod"].__name__).lower()
    if not isinstance(given, str) or not given.isidentifier():
        raise errors.BadArgument(f"{given!r} is no name for a module", at=call.directive.at)
    return given


def dotted(target: Function) -> str:
    """The name by which the model file may refer to a class or function."""
    module = target.module or SCHEDULE
    module = "torch.nn" if module.startswith("torch.nn.modules.") else module
    return f"{module}.{target.name}"


def _free(name: str, engine: Engine) -> str:
    """A class name that the file does not have yet."""
    unique, number = name, 2
    while unique in engine.file.names:
        unique, number = f"{name}{number}", number + 1
    return unique


def _listed(names: Sequence[str]) -> str:
    shown = [f"`{name}`" for name in names]
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def check_stateless(call: Call, node: Node) -> None:
    """Refuses a new module whose parameters nothing says the values of.

    Raises:
        WeightsMisfit: It holds some.
    """
    name = module_name(call) if isinstance(call.arguments["new_mod"], type) else ""
    held = node.children.get(name)
    if held is not None and (tensors := list(held.live.state_dict())):
        raise errors.WeightsMisfit(
            f"`{held.path}` would hold `{tensors[0]}`, and nothing says what that is made of",
            at=call.directive.at,
            hint="give the function what the pattern's own parameters stand for, or replace the "
            "whole module, with weights=...",
        )
