"""The rewrite as planned so far: the module tree, and what was asked of each module."""

from __future__ import annotations

from typing import Any

from slapo_rewrite.edit.state import EMPTY, Directive, ModuleState
from slapo_rewrite.model.tree import Node, Tree
from slapo_rewrite.primitives.base import Call, Primitive
from slapo_rewrite.schedule.load import ScheduleFile


class Plan:
    """Takes primitive calls in the schedule's order.

    Attributes:
        tree: The module tree on the meta device.
        schedule: The schedule file.
        directives: The primitive calls so far.
        states: What was asked of each module path; a path that is not in it was not touched.
        order: The position of each path in the tree.
    """

    def __init__(self, tree: Tree, schedule: ScheduleFile) -> None:
        self.tree, self.schedule = tree, schedule
        self.directives: list[Directive] = []
        self.states: dict[str, ModuleState] = {}
        self.order = {path: number for number, path in enumerate(tree.nodes)}

    def call(
        self, primitive: Primitive, nodes: list[Node], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Carries out one primitive call on the selected modules.

        The primitive decides once for each different combination of class, parameter shapes and
        state, not for each module.
        """
        at = self.schedule.caller()
        directive = Directive(
            len(self.directives),
            primitive.name,
            at,
            self.schedule.statement(at.line) if at else primitive.name,
            tuple(node.path for node in nodes),
        )
        call = Call(directive, self.schedule.module, primitive.bind(args, kwargs, at))
        self.directives.append(directive)
        decided: dict[tuple[int, int], ModuleState] = {}
        for node in primitive.targets(call, nodes):
            state = self.states.get(node.path, EMPTY)
            # States are shared, so that one object is one state.
            key = (node.kind, id(state))
            if key not in decided:
                decided[key] = primitive.apply(call, node, state)
            self.states[node.path] = decided[key]
