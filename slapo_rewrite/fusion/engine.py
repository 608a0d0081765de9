"""Turns claims into edits: checks who shares the text, writes replacements, removes dead code."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from slapo_rewrite import errors
from slapo_rewrite.changes.change_set import ChangeSet
from slapo_rewrite.changes.imports import Reference
from slapo_rewrite.changes.output_files import OutputFiles
from slapo_rewrite.changes.places import AtNode
from slapo_rewrite.changes.replace_statement import ReplaceStatement
from slapo_rewrite.changes.source_rewrite import Rewrite
from slapo_rewrite.changes.state import ModuleRequests
from slapo_rewrite.code.dataflow import bound_in, names_in, parameters_in
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.lines import Lines, written
from slapo_rewrite.code.runs import above, behind
from slapo_rewrite.code.splice import Edit, apply_edits
from slapo_rewrite.code.syntax import extent
from slapo_rewrite.code.text import accessor
from slapo_rewrite.directive import Directive
from slapo_rewrite.fusion.claims import Claim, Renamed, Skipped, by_text, misuse
from slapo_rewrite.fusion.method_users import Sharing
from slapo_rewrite.fusion.replacements import Writing, apart, idle_statements, replacements
from slapo_rewrite.fusion.rule import graph_in
from slapo_rewrite.fusion.spelled_names import Spelling
from slapo_rewrite.groups import grouped
from slapo_rewrite.lowering.specialize import specialize
from slapo_rewrite.model.auto_classes import is_looked_up
from slapo_rewrite.model.node_facts import method_of
from slapo_rewrite.model.representatives import Representatives
from slapo_rewrite.model.sources import Sources
from slapo_rewrite.model.tree import Tree
from slapo_rewrite.patterns.replacement import Replaced


class Engine:
    """Turns claims into one rewrite of the source."""

    def __init__(
        self,
        tree: Tree,
        sources: Sources,
        states: Mapping[str, ModuleRequests],
        cause: Directive,
        earlier: Sequence[Reference] = (),
    ) -> None:
        self.tree, self.sources, self.states = tree, sources, states
        self.cause = cause
        self.file: SourceFile = sources.main
        self.earlier = earlier
        self.speller = Spelling(self.file, cause, earlier)
        self.sharing = Sharing(tree, sources)
        self._texts: dict[tuple[object, ...], str] = {}

    # Which claims can be carried out --------------------------------------------------------------

    def sorted_out(self, claims: Sequence[Claim]) -> tuple[list[Claim], list[Skipped]]:
        """The claims that can be carried out, and the others with the reason.

        Of two claims on the same text, the earlier wins.
        """
        # For each text: the nodes that it touches, and the claim of each module.
        taken: dict[int, tuple[set[int], dict[str, Claim]]] = {}
        kept: list[Claim] = []
        left: list[Skipped] = []
        claiming = grouped((id(claim.match.replaced.node), claim.node.path) for claim in claims)
        for group in by_text(claims):
            stop = self._stop(group, claiming[id(group[0].match.replaced.node)])
            if stop is not None:
                left.append(stop)
                continue
            for claim in group:
                text, path = claim.match.replaced, claim.node.path
                if id(text) not in taken:
                    taken[id(text)] = (_touched(text), {})
                touched, here = taken[id(text)]
                others = (
                    c[path] for t, c in taken.values() if path in c and not t.isdisjoint(touched)
                )
                other = next(others, None)
                if other is not None:
                    reason = f"`{other.what}` already replaces it"
                    apart = {*claim.match.nodes}.isdisjoint(other.match.nodes)
                    left.append(Skipped(claim, reason, harmless=True, waits=apart))
                    continue
                here[path] = claim
                kept.append(claim)
        return kept, left

    def _stop(self, group: list[Claim], claiming: Collection[str]) -> Skipped | None:
        """The reason why a text cannot be changed for the modules of a group, if any.

        The group has equal claims on it; `claiming` are all modules with any claim on it.
        """
        first = group[0]
        match = first.match
        if match.file is not self.file:
            where = f"it is in {match.file.path.name}, which is not rewritten"
            return Skipped(first, where, harmless=True)
        for claim in group:
            if is_looked_up(self.sources, claim.node):
                where = f"`{claim.node.path}` is constructed by code that uses the original's class"
                return Skipped(claim, where, "write its construction out", harmless=True)
        if not match.replaced.whole:
            return Skipped(first, "a statement computes a part of it, and other values")
        if (reason := misuse(first)) is not None:
            return Skipped(first, reason)
        for claim in group:
            for path in (*claim.called(), *claim.idle()):
                tied = self._tied_to_sharded(path) if path in claim.idle() else None
                if tied is not None:
                    return Skipped(claim, f"{tied}, but it reads that whole", "leave it whole")
                if (state := self._scheduled(path)) is not None and not claim.splits(path, state):
                    line = _first_line(state)
                    return Skipped(
                        claim,
                        f"`{path}`, which it calls, is scheduled before{line}",
                        "fuse first, then schedule the rest",
                    )
        function = self.sharing.function_of(match.replaced.node)
        if self.sharing.owner_of(function) is None:
            if first.constructor is not None:
                return Skipped(first, f"`{function.name}` is no method, so it has no modules")
            claimed = {claim.node.path for claim in group}
            other = next((n for n in self.sharing.sharers(function) if n.path not in claimed), None)
            if other is not None:
                calls = f"`{other.path or 'the model'}` calls `{function.name}` too, and would"
                if other.path in claiming:
                    hint = 'use one backend for both: backend="triton"'
                    return Skipped(first, f"{calls} use another backend", hint)
                return Skipped(first, f"{calls} not be fused", "select all modules that call it")
        return None

    def _scheduled(self, path: str) -> ModuleRequests | None:
        """The requests for a module or one below it, except annotations."""
        for asked, state in self.states.items():
            if (asked == path or asked.startswith(f"{path}.")) and not state.is_plain():
                return state
        return None

    def _tied_to_sharded(self, path: str) -> str | None:
        """Words for a parameter of a module that is sharded by one of its tied names, or None."""
        for names in self.tree.ties.values():
            if any(name.rpartition(".")[0] == path for name in names):
                for name in names:
                    holder, _, last = name.rpartition(".")
                    state = self.states.get(holder)
                    if state is not None and any(shard.name == last for shard in state.shards):
                        return f"`{name}` is sharded{_first_line(state)}"
        return None

    def refused(self, left: Skipped) -> errors.RewriteError:
        """The error for a match that cannot be replaced."""
        return errors.NoMatch(
            f"`{left.claim.what}` cannot replace its match: {left.reason}",
            at=left.claim.place(),
            cause=self.cause,
            hint=left.hint,
        )

    # Branches -------------------------------------------------------------------------------------

    def opened(self, claims: Sequence[Claim]) -> Rewrite | None:
        """The rewrite that sinks statements into the arms of branches, for claims that need it.

        None if no claim does. The claims must be searched for again afterwards.
        """
        first: dict[ast.stmt, ReplaceStatement] = {}
        branches: dict[str, dict[ast.stmt, ReplaceStatement]] = {}
        for claim in claims:
            drawn = claim.match.drawn
            if drawn is None:
                continue
            if drawn.branch not in first:
                edits = tuple(drawn.edits())
                first[drawn.branch] = ReplaceStatement(drawn.branch, claim.what, splices=edits)
            branches.setdefault(claim.node.path, {})[drawn.branch] = first[drawn.branch]
        # Equal changes are one object, so that equal modules can be recognised by identity.
        known: dict[frozenset[ast.stmt], dict[ast.stmt, ReplaceStatement]] = {}
        changes = {path: known.setdefault(frozenset(own), own) for path, own in branches.items()}
        if not changes:
            return None
        return Rewrite(
            self._written(changes, {}), tuple(self.speller.references.values()), again=True
        )

    # What changes ---------------------------------------------------------------------------------

    def rewrite(self, claims: Sequence[Claim], notes: tuple[Mapping[str, object], ...]) -> Rewrite:
        """The rewrite that carries out claims."""
        if not claims:
            return Rewrite([], notes=notes)
        edits, absorbed = self._carried_out(claims)
        # Text that no module runs any more stays unchanged.
        groups = [g for g in by_text(claims) if not all(_is_below(c, absorbed) for c in g)]
        live = [claim for group in groups for claim in group]
        if len(live) < len(claims):
            self._begin_anew()
            edits, absorbed = self._carried_out(live)
        idle = tuple(dict.fromkeys(path for c in live for path in c.idle()))
        references = tuple(self.speller.references.values())
        return Rewrite(edits, references, absorbed, notes, idle=idle)

    def possible(self, claims: Sequence[Claim]) -> tuple[list[Claim], list[Skipped]]:
        """The claims that can be written, and the others with the reason; each text by itself."""
        kept: list[Claim] = []
        left: list[Skipped] = []
        for group in by_text(claims):
            try:
                if self.opened(group) is None:
                    self.rewrite(group, ())
            except (errors.Unsupported, errors.UnfollowableConstruction) as error:
                left += [Skipped(claim, error.message) for claim in group]
            else:
                kept += group
            self._begin_anew()
        return kept, left

    def _begin_anew(self) -> None:
        self.speller = Spelling(self.file, self.cause, self.earlier)
        self._texts.clear()

    def _carried_out(self, claims: Sequence[Claim]) -> tuple[list[Edit], tuple[str, ...]]:
        """The edits, and the modules that are no longer called."""
        by_path = grouped((claim.node.path, claim) for claim in claims)
        known: dict[tuple[object, ...], dict[ast.stmt, ReplaceStatement]] = {}
        changes: dict[str, dict[ast.stmt, ReplaceStatement]] = {}
        for path, here in by_path.items():
            key: tuple[object, ...] = tuple(
                (id(c.match.replaced.node), self._text(c), c.method) for c in here
            )
            if key not in known:
                known[key] = self._changes(here)
            changes[path] = known[key]
        edits = [*self._written(changes, by_path), *self._functions(claims)]
        edits = list(dict.fromkeys(edits))
        return edits, self._absorbed(claims, edits)

    def _written(
        self,
        by_path: Mapping[str, dict[ast.stmt, ReplaceStatement]],
        claims: Mapping[str, Sequence[Claim]],
    ) -> list[Edit]:
        """The edits of methods that modules run, in place or in subclasses.

        `by_path` has the changes by module path and statement; `claims` may need statements in
        constructors.
        """
        functions: dict[ast.stmt, Lines] = {}
        asked = {path: id(changes) for path, changes in by_path.items()}
        alike = Representatives(self.tree, asked)
        with alike.reduced():
            files = OutputFiles(self.tree, self.sources)
            files.siblings(alike.siblings)
            for path in asked:
                if path not in self.tree.nodes:
                    continue
                for statement, change in by_path[path].items():
                    if self.sharing.owner_of(self.sharing.function_of(statement)) is None:
                        functions[statement] = Lines()
                        change.add_to(functions[statement], (self.cause,))
                        continue
                    place = AtNode("text", extent(statement))
                    files.main.changes.add(path, place, change, (self.cause,))
                self._construct(claims.get(path, ()), files.main.changes)
            settled = specialize(self.tree, files)
        self.speller.references.update(files.main.imports.references)
        edits = written(self.file, functions) + settled.pop(self.file.name)
        if any(settled.values()):
            raise errors.Unsupported(
                "some instances of a class get a subclass, but are constructed in another file",
                hint="select all instances alike",
            )
        return edits

    def _construct(self, claims: Sequence[Claim], changes: ChangeSet) -> None:
        """Adds statements to the constructor that create the modules that claims call."""
        for claim in claims:
            if claim.constructor is None:
                continue
            found = method_of(self.sources, claim.node.cls, "__init__")
            if found is None or found[0] is not self.file:
                raise errors.Unsupported(
                    f"`{claim.node.cls.__name__}` has no constructor in {self.file.path.name}: "
                    f"there is no place to construct `{claim.what}`"
                )
            last = found[1].body[-1]
            place = AtNode("text", extent(last), claim.constructor)
            write = ReplaceStatement(last, claim.what, after=(claim.constructor,))
            changes.add(claim.node.path, place, write, (self.cause,))

    def _text(self, claim: Claim) -> str:
        key = (claim.expression, tuple(claim.operands.items()), claim.backend)
        if key not in self._texts:
            spell = self.speller.by(claim.backend)
            self._texts[key] = claim.expression.written(claim.operands, spell)
        return self._texts[key]

    def _changes(self, claims: Sequence[Claim]) -> dict[ast.stmt, ReplaceStatement]:
        """The changes of one module's class, by statement."""
        writings: dict[ast.FunctionDef, list[Writing]] = {}
        more = []
        for claim in claims:
            self._check_names(claim)
            text = self._text(claim)
            if claim.spread is not None:
                spread = claim.spread.edits(text, claim.what, self.speller)
                more += list(spread.values())
            else:
                function = self.sharing.function_of(claim.match.replaced.node)
                writing = Writing(claim.match.replaced, text, claim.what, claim.moved)
                writings.setdefault(function, []).append(writing)
        every = [each for function, here in writings.items() for each in apart(here, function)]
        found = replacements(self.file, every)
        for statement, claim in self._idle([c for c in claims if c.spread is None]):
            if statement not in found:
                found[statement] = ReplaceStatement(statement, claim.what, gone=True)
        for claim in claims:
            if claim.method is not None:
                method = self.sharing.function_of(claim.match.replaced.node)
                placed = behind(self.file, method, claim.method, 1)
                more.append(ReplaceStatement(method, claim.what, splices=(placed,)))
        for change in more:
            known = found.get(change.statement)
            found[change.statement] = known.joined(change) if known else change
        return found

    def _idle(self, claims: Sequence[Claim]) -> Iterator[tuple[ast.stmt, Claim]]:
        """Assignments that only the old text reads."""
        for here in grouped((claim.match.function, claim) for claim in claims).values():
            texts = [claim.match.replaced for claim in here]
            old = [t.node for t in texts if not t.above] + [n for t in texts for n, _ in t.reads]
            new = names_in(*(ast.parse(self._text(claim)) for claim in here))
            graph = graph_in(self.sources, here[0].node, here[0].match.function)
            removed = [statement for t in texts for statement in t.removed]
            for statement in idle_statements(graph, old, removed, new):
                yield statement, here[0]

    def _functions(self, claims: Sequence[Claim]) -> list[Edit]:
        """Inserts new functions, each above the first class or function that calls it."""
        callers: dict[str, ast.stmt] = {}
        for claim in claims:
            function = self.sharing.function_of(claim.match.replaced.node)
            owner = self.sharing.owner_of(function)
            node: ast.stmt = self.file.classes[owner] if owner else function
            if claim.function is not None:
                first = callers.setdefault(claim.function, node)
                if node.lineno < first.lineno:
                    callers[claim.function] = node
        return [
            above(self.file, node, text).caused_by((self.cause,), "called below")
            for text, node in callers.items()
        ]

    def _check_names(self, claim: Claim) -> None:
        """Raises if a name in the new text is a local variable of the function."""
        function = self.sharing.function_of(claim.match.replaced.node)
        bound = parameters_in(function) | bound_in(function)
        written = claim.expression
        if isinstance(written, Renamed):  # its arguments are in the text already
            written = replace(written, arguments="()")
        given = dict.fromkeys(claim.operands, "None")
        text = written.written(given, self.speller.by(claim.backend))
        used = names_in(ast.parse(text))
        if taken := (used - {"self"}) & bound:
            raise errors.NameTaken(
                f"`{min(taken)}` is a local variable of `{function.name}`, but the name is needed "
                f"for `{claim.what}`",
                at=self.file.at(function),
                hint="rename the variable in the source",
            )

    def _absorbed(self, claims: Sequence[Claim], edits: list[Edit]) -> tuple[str, ...]:
        """The modules that the matches called and that the new text no longer calls."""
        text, _ = apply_edits(self.file.text, edits)
        tree = self.file.parsed(text)
        found: dict[str, None] = {}
        calls: dict[str, set[str]] = {}
        for claim in claims:
            function = self.sharing.function_of(claim.match.replaced.node)
            home = self.sharing.owner_of(function) or ""
            if home not in calls:
                calls[home] = _calls(tree, home)
            for path, called in zip(claim.called(), claim.match.calls, strict=True):
                if accessor(called) not in calls[home] and called != claim.linear:
                    found[path] = None
        return tuple(found)


def _calls(tree: ast.Module, class_name: str) -> set[str]:
    """The texts of callees and arguments of calls in a class, or in the file."""
    home: ast.AST = tree
    for node in tree.body if class_name else ():
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            home = node
    calls = [n for n in ast.walk(home) if isinstance(n, ast.Call)]
    return {ast.unparse(e) for call in calls for e in (call.func, *call.args)}


def _is_below(claim: Claim, above: Iterable[str]) -> bool:
    """Whether the module of a claim is one of these modules, or below one."""
    return any(f"{claim.node.path}.".startswith(f"{each}.") for each in above)


def _touched(replaced: Replaced) -> set[int]:
    """The ids of nodes in removed statements and replaced expressions."""
    # Only expressions and statements: contexts (`ast.Load()`) are shared objects.
    gone = (replaced.node, *replaced.removed, *(node for node, _ in replaced.reads))
    every = (n for outer in gone for n in ast.walk(outer))
    return {id(n) for n in every if isinstance(n, (ast.expr, ast.stmt))}


def _first_line(state: ModuleRequests) -> str:
    causes = [c.at for c in state.causes() if c.at]
    return f" by line {causes[0].line}" if causes else ""
