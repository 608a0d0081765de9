"""The plan: the module tree, and what the schedule has requested of each module so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.around_forward import WrapForward
from slapo_rewrite.changes.imports import Reference
from slapo_rewrite.changes.source_rewrite import Rewrite
from slapo_rewrite.changes.state import EMPTY, ModuleRequests
from slapo_rewrite.directive import Directive, Share
from slapo_rewrite.model.sources import Sources
from slapo_rewrite.model.tree import Node, Tree
from slapo_rewrite.primitives.base import Call, OnRanks, Primitive, Question
from slapo_rewrite.schedule.load import ScheduleFile

# Changes the source; returns the tree of the model that it then defines, and its files.
Change = Callable[[Directive, Rewrite], tuple[Tree, Sources]]


class Plan:
    """Collects what the schedule's primitive calls request, in their order.

    Attributes:
        tree: The module tree on the meta device.
        sources: The files that define the model's classes.
        directives: The primitive calls so far.
        states: The requests of each module, by path; untouched modules are not in it.
        order: The position of each path in the tree.
        idle: Modules that are no longer called, with the directive that caused it.
        seldom: Modules that are only called in eval mode, likewise; their submodules may be.
        notes: Which rules applied where, by the number of the directive that asked for them.
        warnings: Shares of layers that other lengths would not treat as meant.
        references: What the changed source imports from elsewhere.

    Args:
        change: Changes the source; None if no primitive of the schedule does.
        on_ranks: Measures the scheduled model as one of several ranks; None if no primitive may
            choose by that.
    """

    def __init__(
        self,
        tree: Tree,
        schedule: ScheduleFile,
        sources: Sources,
        change: Change | None = None,
        on_ranks: OnRanks | None = None,
    ) -> None:
        self.tree, self.schedule, self.sources = tree, schedule, sources
        self.change, self.on_ranks = change, on_ranks
        self.directives: list[Directive] = []
        self.states: dict[str, ModuleRequests] = {}
        self.idle: dict[str, Directive] = {}
        self.seldom: dict[str, Directive] = {}
        self.notes: dict[int, tuple[Mapping[str, object], ...]] = {}
        self.warnings: list[str] = schedule.shadowed()
        self.references: tuple[Reference, ...] = ()
        self.order = {path: number for number, path in enumerate(tree.nodes)}
        # Calls that replaced modules in the tree: repeated after the tree is rebuilt.
        self._grafted: list[tuple[Primitive, Call, list[str]]] = []
        self._choices: list[tuple[Primitive, Call]] = []

    def call(
        self,
        primitive: Primitive,
        nodes: list[Node],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shares: tuple[Share, ...] = (),
    ) -> Any:
        """Carries out one primitive call on the selected modules; returns a question's answer.

        The primitive decides once for each combination of class, parameter shapes and state, not
        for each module.
        """
        at = self.schedule.caller()
        if not isinstance(primitive, Question):
            nodes = self._first_named(nodes)
        directive = Directive(
            len(self.directives),
            primitive.name,
            at,
            self.schedule.statement(at.line) if at else primitive.name,
            tuple(node.path for node in nodes),
            shares,
        )
        arguments = primitive.bind(args, kwargs)
        call = Call(
            directive,
            self.schedule.module,
            arguments,
            self.sources,
            self.tree,
            self.states,
            references=self.references,
            on_ranks=self.on_ranks,
        )
        if isinstance(primitive, Question):
            return primitive.answer(call, nodes)
        if not self.directives:
            self.sources.check_originals(self.tree.root)
        call, nodes = self._rewritten(primitive, call, nodes)
        if (done := call.done) is not None:
            self.idle |= dict.fromkeys(done.absorbed, directive)
            self.seldom |= dict.fromkeys(done.idle, directive)
            self.warnings += done.warnings
            if done.notes:
                self.notes[directive.number] = done.notes
        chosen = primitive.choose(call, nodes)
        targets, call = list(chosen.nodes), replace(call, instead=chosen.instead)
        if chosen.outcome is not None:
            paths = tuple(node.path for node in targets)
            directive = replace(directive, paths=paths, shares=(), outcome=chosen.outcome)
            call = replace(call, directive=directive)
            self._choices.append((primitive, call))
        self.directives.append(directive)
        decided: dict[tuple[int, int], ModuleRequests] = {}
        grafts: dict[str, Any] = {}
        for node in targets:
            if self.tree.nodes.get(node.path) is not node:
                raise errors.UnknownPath(
                    f"{node.shown} was part of a module that has been replaced",
                    hint=f's["{node.path}"] selects the module that is there now'
                    if node.path in self.tree.nodes
                    else "select from `s` again",
                )
            if primitive.needs_calls and done is None:
                self._check_called(node, directive)
            state = self.states.get(node.path, EMPTY)
            # Modules share states, so that the object's id stands for one.
            key = (node.kind, id(state))
            if key not in decided:
                decided[key] = primitive.apply(call, node, state)
            self._check_ties(node, decided[key])
            self.states[node.path] = decided[key]
            if (module := primitive.replacement(call, node)) is not None:
                grafts[node.path] = module
        if grafts:
            self._check_untouched(grafts)
            self._grafted.append((primitive, call, list(grafts)))
            self._graft(grafts)
        return None

    @property
    def shares(self) -> tuple[Share, ...]:
        """The slices by fractions in all selections, each once."""
        return tuple(dict.fromkeys(s for d in self.directives if d.paths for s in d.shares))

    def _first_named(self, nodes: list[Node]) -> list[Node]:
        """Replaces each node by the first node of the same module, which may have several.

        A node that is no longer in the tree is kept, and refused later.
        """
        first = {}
        for node in nodes:
            if others := self.sources.same_live(node):
                node = min((node, *others), key=lambda n: self.order.get(n.path, -1))
            first[node.path] = node
        return list(first.values())

    def _graft(self, grafts: Mapping[str, Any]) -> None:
        """Replaces modules in the tree."""
        self.tree.graft(grafts)
        self.sources.regrown()
        self.order = {path: number for number, path in enumerate(self.tree.nodes)}

    def _rewritten(
        self, primitive: Primitive, call: Call, nodes: list[Node]
    ) -> tuple[Call, list[Node]]:
        """Changes the source if the primitive wants it; returns the call and nodes after that."""
        while True:
            rewrite = primitive.rewrites(call, list(nodes))
            rewrite = rewrite.after(call.done) if rewrite is not None else None
            if rewrite is None or not rewrite.edits:
                return replace(call, done=rewrite), nodes
            assert self.change is not None
            self.tree, self.sources = self.change(call.directive, rewrite)
            self.references = tuple(dict.fromkeys((*self.references, *rewrite.references)))
            for grafting, earlier, paths in self._grafted:
                again = replace(earlier, sources=self.sources, tree=self.tree)
                pairs = ((p, grafting.replacement(again, self.tree.nodes[p])) for p in paths)
                self._graft({path: module for path, module in pairs if module is not None})
            self.order = {path: number for number, path in enumerate(self.tree.nodes)}
            self._check_there(call.directive)
            known = self.references
            call = replace(call, sources=self.sources, tree=self.tree, references=known)
            nodes = [self.tree.nodes[n.path] for n in nodes if n.path in self.tree.nodes]
            if not rewrite.again:
                return replace(call, done=rewrite), nodes
            if rewrite.notes:  # it did more than open branches
                call = replace(call, done=rewrite)

    def _check_there(self, directive: Directive) -> None:
        """Checks that the changed source still defines every module that was scheduled."""
        for path, state in self.states.items():
            if state != EMPTY and path not in self.tree.nodes:
                raise errors.ConflictingEdits(
                    f"`{path}` no longer exists after `{directive.primitive}(...)`, but was "
                    "scheduled before",
                    cause=self._causes(path),
                    hint="change the source first, then schedule the new modules",
                )

    def _causes(self, path: str) -> list[Directive]:
        return [d for d in self.directives if path in d.paths and d.at]

    def _check_called(self, node: Node, directive: Directive) -> None:
        """Refuses a module that is no longer called, for primitives that act at its calls."""
        for above in node.outwards() if self.idle else ():
            if above.path not in self.idle:
                continue
            words, hint = (
                f"{above.shown} is no longer called",
                "schedule its replacement",
            )
            raise _conflict(words, self.idle[above.path], directive, hint)
        if node.path in self.seldom:
            words, hint = f"in training {node.shown} is no longer called", "leave it as it is"
            raise _conflict(words, self.seldom[node.path], directive, hint)

    def _check_ties(self, node: Node, state: ModuleRequests) -> None:
        """Refuses to shard a parameter that is also read whole from a module not called."""
        for shard in state.shards if self.seldom else ():
            name = f"{node.path}.{shard.name}"
            tied = (other for names in self.tree.ties.values() if name in names for other in names)
            for other in tied:
                path = other.rpartition(".")[0]
                if path in self.seldom:
                    words = f"`{name}` is also `{other}`, which is read as a whole in training"
                    raise _conflict(words, self.seldom[path], shard.cause, "leave it whole")

    def check(self) -> None:
        """Checks that the directives of the whole schedule fit together (`ConflictingEdits`)."""
        for primitive, call in self._choices:
            primitive.check_whole(call)
        self._check_cuts()

    def _check_cuts(self) -> None:
        """Checks that pipeline cuts fit the other directives."""
        cuts = {path: state.cut for path, state in self.states.items() if state.cut}
        if cuts and self.seldom:
            path, cause = next(iter(self.seldom.items()))
            words = (
                f"the last stage has to return `{path}`'s output, which training does not compute"
            )
            raise _conflict(words, cause, next(iter(cuts.values())).cause, None)
        budget = next((d for d in self.directives if d.outcome is not None), None)
        if cuts and budget is not None:
            words = "a budget is for a step of a model without pipeline stages"
            hint = "select a share of the layers instead: [:0.5].checkpoint()"
            raise _conflict(words, budget, next(iter(cuts.values())).cause, hint)
        for inner, cut in cuts.items():
            for outer, state in self.states.items():
                wrapped = state.asks(WrapForward)
                if wrapped and inner.startswith(f"{outer}." if outer else ""):
                    words = f"no stage can end at `{inner}`, inside of `{outer or 'the model'}`, "
                    words += "whose forward is run as a whole"
                    hint = "name modules inside of it instead, on both sides of the cut"
                    raise _conflict(words, wrapped[0][1], cut.cause, hint)

    def _check_untouched(self, grafts: Mapping[str, Any]) -> None:
        """Refuses to replace a module after something inside it was scheduled."""
        for path, state in self.states.items():
            above = path.rpartition(".")[0]
            while above and above not in grafts:
                above = above.rpartition(".")[0]
            if above and state != EMPTY:
                raise errors.ConflictingEdits(
                    f"`{above}` cannot be replaced after `{path}` in it was changed",
                    cause=self._causes(path),
                    hint="replace first, then schedule the new modules",
                )


def _conflict(
    words: str, cause: Directive, directive: Directive, hint: str | None
) -> errors.ConflictingEdits:
    """The error for a request that an earlier directive rules out."""
    line = f" of line {cause.at.line}" if cause.at else ""
    return errors.ConflictingEdits(
        f"{words} since `{cause.primitive}(...)`{line}", at=directive.at, cause=cause, hint=hint
    )
