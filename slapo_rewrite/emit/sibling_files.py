"""The files that an output holds beside the model file, since they define changed classes.

A file that the schedule changes is copied into the output. So is a file that has to use a changed
class: it derives a class from one, instantiates one, or re-exports one. Files of the output import
all definitions of a copied file, changed or not, from the copy: within the output there is one
class of each name, so that `isinstance` and base classes agree. A registry that makes modules of a
changed class is copied too, with the files of the classes that it holds: the output has a registry
of its own, in which its own classes are registered.
"""

from __future__ import annotations

import ast
import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from slapo_rewrite import errors
from slapo_rewrite.changes.construction import UseSubclass
from slapo_rewrite.changes.imports import Imports
from slapo_rewrite.changes.output_files import OutputFiles, is_torch
from slapo_rewrite.code.dataflow import bound_in, names_in
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.import_lines import from_module, instead, is_remarked
from slapo_rewrite.code.splice import Change, Edit
from slapo_rewrite.code.text import imported_as
from slapo_rewrite.directive import REDIRECTED, Directive, merged_causes
from slapo_rewrite.emit.imported_names import Target, chased, imported_names
from slapo_rewrite.emit.registries import registered
from slapo_rewrite.model import construction_calls
from slapo_rewrite.model.join import Sources, known_site
from slapo_rewrite.model.tree import Node, Tree


class SiblingFiles:
    """The rewritten files of the output, and the redirected imports between them."""

    def __init__(
        self,
        sources: Sources,
        outputs: OutputFiles,
        edits: Mapping[str, Sequence[Edit]],
        tree: Tree,
    ) -> None:
        self.sources, self.outputs, self.edits = sources, outputs, edits
        main = sources.main
        # The files, by their modules' names, the model file first.
        self.files: dict[str, SourceFile] = {main.name: main}
        for name, own in edits.items():
            file = sources.file_named(name)
            if own and file is not None:
                self.files[name] = file
        self._affected: dict[Target, bool] = {}
        self._registered = registered(sources, tree)
        made_in = outputs.made_in(tree)
        self._subclassed = {n.cls for n, made, _ in made_in if isinstance(made, UseSubclass)}
        self._registries: set[str] = set()  # those that are copied
        if len(self.files) > 1 or self._registered:
            self._close()

    def name(self, file: SourceFile) -> str:
        """The name of a file in the output folder."""
        return f"{self.outputs.stem(file)}.py"

    def check_built(self, emitted: Tree, tree: Tree, before: Iterable[Change] = ()) -> None:
        """Checks that the output's model has no original classes in the places of changed ones."""
        main = self.sources.main
        why = functools.cache(
            lambda file, name: self._why(file, name, before if file is main else ())
        )
        made_in = self.outputs.made_in(tree)
        recast = {
            n.path: w for n, made, w in made_in if isinstance(made, UseSubclass) and made.recast
        }
        for path, node in emitted.nodes.items():
            for cls in node.cls.__mro__:
                file = self.files.get(cls.__module__)
                is_named = file is not None and cls.__name__ in file.classes
                causes = recast.get(path, why(file, cls.__name__)) if file and is_named else ()
                if not causes:
                    continue
                # Its owner may be of an original class already.
                held = [n for n in (node, *node.owners()) if n.cls.__module__ in self.files]
                raise self._made_elsewhere(held[-1], tree.nodes.get(held[-1].path), causes)

    def _made_elsewhere(
        self, node: Node, known: Node | None, causes: tuple[Directive, ...]
    ) -> errors.RewriteError:
        """The error for a module of an original class; `known` is the original's node."""
        name = node.cls.__name__
        site = known_site(self.sources, known) if known is not None else None
        if site and name not in {*names_in(site.call), getattr(site.callee, "attr", "")}:
            return errors.UnfollowableConstruction(
                f"{node.shown} is a `{name}`, which changes, but the code that constructs it here "
                "only knows the original's class",
                at=site.file.at(site.value),
                cause=causes,
                hint=f"write the construction out: {_written_out(site.value, name)}"
                + (", imported by its name" if node.cls.__module__ != site.file.name else ""),
            )
        stack = construction_calls.stack_of(known.live) if known is not None else ()
        return errors.UnfollowableConstruction(
            f"{node.shown} is the original's `{name}` in the output as well: the code that "
            "constructs it does not use the output's class",
            at=construction_calls.place(stack),
            cause=causes,
            hint="name the class where it is constructed. In the schedule, take it from `m`",
        )

    def _why(self, file: SourceFile, name: str, before: Iterable[Change]) -> tuple[Directive, ...]:
        """The directives that change a class of a file."""
        node = file.classes[name]
        (start, end), last = file.span(node), node.end_lineno or node.lineno
        edits = [e for e in self.edits.get(file.name, ()) if e.start < end and e.end > start]
        changes = [c for c in before if c.first <= last and c.last >= node.lineno]
        return merged_causes(*(e.causes for e in edits), *(c.causes for c in changes))

    # Which files ----------------------------------------------------------------------------

    def _close(self) -> None:
        """Adds the files that have to use changed definitions."""
        added = True
        while added:
            self._affected.clear()
            added = False
            for file in list(self.files.values()):
                used = [t[0] for _, t in imported_names(self.sources, file) if self._sees(*t)]
                for module in dict.fromkeys([*self._named_by(file), *self._known(), *used]):
                    if module not in self.files:
                        found = self.sources.file_named(module)
                        assert found is not None
                        self.files[module] = found
                        added = True

    def _known(self) -> Iterator[str]:
        """The registries that have to know a class that changed, and the files of their classes."""
        for cls, (homes, is_made) in self._registered.items():
            changed = cls in self._subclassed or self._sees(cls.__module__, cls.__name__)
            if is_made and changed:
                self._registries |= homes
        yield from self._registries
        for cls, (homes, _) in self._registered.items():
            if homes & self._registries:
                yield cls.__module__

    def registering(self) -> list[str]:
        """The files that only their registering puts into the output, as they are called there."""
        if not self._registries:
            return []
        reached, waiting = set[str](), [self.sources.main.name]
        while waiting:
            if (module := waiting.pop()) not in reached:
                reached.add(module)
                imported = imported_names(self.sources, self.files[module])
                waiting += [target for _, (target, _) in imported if target in self.files]
        return [self._stem(module) for module in self.files.keys() - reached]

    def _named_by(self, file: SourceFile) -> list[str]:
        """The modules whose copies the edits of a file refer to."""
        helpers = self.outputs.of_file(file).imports.helpers
        files = [output.file for output in self.outputs]
        return [each.name for each in files if self.outputs.stem(each) in helpers]

    def _sees(self, *target: str) -> bool:
        """Whether a definition changed, or uses a changed one directly or indirectly."""
        seen: set[Target] = set()
        waiting: list[Target] = [(target[0], target[1])]
        while waiting:
            each = waiting.pop()
            if self._affected.get(each) or self._is_changed(*each):
                self._affected[target[0], target[1]] = True
                return True
            if each not in seen and each not in self._affected:
                seen.add(each)
                waiting += self._used(*each)
        self._affected.update(dict.fromkeys(seen, False))
        return False

    def _is_changed(self, module: str, name: str) -> bool:
        if module in self._registries:
            return True
        if module not in self.files or not self.edits.get(module):
            return False
        file = self.files[module]
        node = _definitions(file).get(name)
        start, end = file.span(node) if node is not None else (0, 0)
        return any(e.start < end and e.end > start for e in self.edits[module])

    def _used(self, module: str, name: str) -> Iterator[Target]:
        """The definitions that a definition, or a whole module, uses and that may have changed."""
        file = self.sources.file_named(module) if module in self._near else None
        if file is None:
            return
        definitions, imports = _definitions(file), dict(imported_names(self.sources, file))
        node = definitions.get(name)
        used = names_in(node) if node else set[str]()
        for each in used if name else definitions.keys() | imports.keys():
            if each in imports:
                yield imports[each]
            elif each in definitions:
                yield module, each

    @functools.cached_property
    def _near(self) -> set[str]:
        """The imported modules whose attributes lead, directly or indirectly, to a changed file."""
        holders: dict[str, set[str]] = {}
        for name, module in list(sys.modules.items()):
            if is_torch(name) or not isinstance(module, types.ModuleType):
                continue
            for value in list(vars(module).values()):
                if isinstance(value, types.ModuleType):
                    holders.setdefault(value.__name__, set()).add(name)
                elif isinstance(value, type | types.FunctionType):
                    holders.setdefault(value.__module__, set()).add(name)
        near = set(self.files)
        waiting = list(near)
        while waiting:
            more = holders.get(waiting.pop(), set()) - near
            near |= more
            waiting += more
        return near

    # Imports --------------------------------------------------------------------------------

    def redirections(self, file: SourceFile, idle: Set[str] = frozenset()) -> list[Edit]:
        """The edits that make the imports of a file absolute, or import from a copy beside it.

        Further names of a copy that the file's edits use are added to its imports.
        """
        if len(self.files) == 1:
            return absolute_imports(file)
        edits: list[Edit] = []
        imports = self.outputs.of_file(file).imports
        for module in self.files:
            imports.beside(module, self._stem(module))
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ImportFrom):
                more = imports if node in file.tree.body else None
                edits += self._redirected(file, node, more, idle)
            elif isinstance(node, ast.Import):
                edits += self._module_imports(file, node)
            elif isinstance(node, ast.Attribute):
                edits += self._through_module(file, node)
        return edits

    def _redirected(
        self, file: SourceFile, node: ast.ImportFrom, imports: Imports | None, idle: Set[str]
    ) -> Iterator[Edit]:
        base = file.resolve_import(node)
        groups: dict[str, list[ast.alias]] = {}
        targets: list[str] = []
        if imports is None or is_remarked(file, node):
            idle = frozenset()  # as `idle_imports` does
        by_star = self._changed_by_star(file, node) if node.names[0].name == "*" else ()
        for alias in (*node.names, *map(ast.alias, by_star)):
            if (alias.asname or alias.name) in idle:
                continue
            if alias.name == "*":
                groups.setdefault(base, []).append(alias)
                continue
            module, name = chased(self.sources, base, alias.name)
            if module not in self.files:
                groups.setdefault(base, []).append(alias)
                continue
            targets.append(module)
            if name and name != alias.name:
                alias = ast.alias(name, alias.asname or alias.name)
            elif not name and self._stem(module) != alias.name:
                alias = ast.alias(self._stem(module), alias.asname or alias.name)
            lead = f".{self._stem(module)}" if name else "."
            groups.setdefault(lead, []).append(alias)
        if imports is not None:
            for lead, names in groups.items():
                names += [ast.alias(n) for n in imports.taken_along(lead)]
        if not targets:
            yield from _absolute(file, node)
            return
        causes = merged_causes(*(self._causes(m) for m in dict.fromkeys(targets)))
        why = REDIRECTED
        same = [a for names in groups.values() for a in names] == node.names
        if len(groups) == 1 and same:
            new = next(iter(groups))
            if new != "." * node.level + (node.module or ""):
                yield from_module(file, node, new).caused_by(causes, why)
            return
        lines = [
            f"from {lead} import {', '.join(map(ast.unparse, names))}"
            for lead, names in groups.items()
        ]
        yield instead(file, node, lines).caused_by(causes, why)

    def _changed_by_star(self, file: SourceFile, node: ast.ImportFrom) -> Iterator[str]:
        """The names of copied files that a file uses by a star import."""
        base = file.resolve_import(node)
        module = sys.modules.get(base)
        shown = getattr(module, "__all__", None) or [
            n for n in vars(module or file) if not n.startswith("_")
        ]
        below = file.tree.body[file.tree.body.index(node) + 1 :]
        again = {
            a.asname or a.name for n in below if isinstance(n, ast.ImportFrom) for a in n.names
        }
        for name in sorted((names_in(file.tree) & {*shown}) - again):
            if chased(self.sources, base, name)[0] in self.files:
                yield name

    def _module_imports(self, file: SourceFile, node: ast.Import) -> Iterator[Edit]:
        """Redirects `import layers` of a copied module."""
        copied = [a for a in node.names if a.name in self.files]
        if not copied:
            return
        kept = [a for a in node.names if a not in copied]
        lines = [f"import {', '.join(map(ast.unparse, kept))}"] if kept else []
        shown = []
        for alias in copied:
            stem, dotted = self._stem(alias.name), "." in alias.name and not alias.asname
            local = alias.asname or (stem if dotted else alias.name)
            if dotted:
                self._check_free(file, node, stem)
            shown.append(imported_as(stem, local))
        causes = merged_causes(*(self._causes(a.name) for a in copied))
        lines.append(f"from . import {', '.join(shown)}")
        placed = instead(file, node, lines)
        yield placed.caused_by(causes, REDIRECTED)

    def _through_module(self, file: SourceFile, node: ast.Attribute) -> Iterator[Edit]:
        """Redirects `package.layers` of a copied module that is used through its package."""
        qualified = file.qualified(node)
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value  # type: ignore[assignment]
        if qualified is None or not isinstance(root, ast.Name) or root.id not in file.imports:
            return
        module = sys.modules.get(qualified)
        holder, _, name = qualified.rpartition(".")
        target = chased(self.sources, holder, name) if holder in sys.modules else None
        if file.imports[root.id] in self.files:
            return  # the name itself means the copy
        if module is not None and qualified in self.files:
            placed = Edit.instead_of(file, node, self._stem(qualified))
            yield placed.caused_by(self._causes(qualified), REDIRECTED)
        elif target is not None and target[0] in self.files and holder not in self.files:
            raise errors.Unsupported(
                f"`{ast.unparse(node)}` comes from `{target[0]}`, which is rewritten as well",
                at=file.at(node),
                hint=f"import it by name: from {target[0]} import {target[1]}",
            )

    def _check_free(self, file: SourceFile, node: ast.stmt, name: str) -> None:
        if name in file.names:
            raise errors.NameTaken(
                f"`{name}` means something else in {file.path.name}, but is a rewritten module",
                at=file.at(node),
                hint=f"import the module under another name: import ... as {name}_module",
            )

    def _stem(self, module: str) -> str:
        return self.outputs.stem(self.files[module])

    def _causes(self, module: str, seen: tuple[str, ...] = ()) -> tuple[Directive, ...]:
        """The directives that change a copied module, or else the modules that it imports."""
        if module == self.sources.main.name or module in seen:
            return ()
        own = merged_causes(*(e.causes for e in self.edits.get(module, ())))
        if own:
            return own
        others = dict.fromkeys(m for _, (m, _) in imported_names(self.sources, self.files[module]))
        return merged_causes(*(self._causes(m, (*seen, module)) for m in others if m in self.files))


def absolute_imports(file: SourceFile) -> list[Edit]:
    """The edits that make relative imports absolute, since the file leaves its package."""
    imports = (n for n in file.statements if isinstance(n, ast.ImportFrom))
    return [edit for node in imports for edit in _absolute(file, node)]


def _absolute(file: SourceFile, node: ast.ImportFrom) -> list[Edit]:
    if not node.level:
        return []
    if not file.package:
        raise errors.SourceError(
            "a relative import in a file that is in no package",
            at=file.at(node),
            hint="give the file's dotted module name instead of its path",
        )
    placed = from_module(file, node, file.resolve_import(node))
    return [placed.caused_by((), "import from outside the package")]


@functools.lru_cache(maxsize=256)
def _definitions(file: SourceFile) -> dict[str, ast.stmt]:
    """The statement that binds each name at a file's top level, without imports."""
    found: dict[str, ast.stmt] = {**file.classes, **file.functions}
    for statement in file.tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef):
            continue
        for name in bound_in(statement):
            found.setdefault(name, statement)
    return found


def _written_out(made: ast.AST, name: str) -> str:
    """A factory's construction, written as a call by the class's own name."""
    match made:
        case ast.Call(func=ast.Attribute(attr="from_config")):
            arguments = [ast.unparse(a) for a in (*made.args, *made.keywords)]
            return f"{name}._from_config({', '.join(arguments)})"
    return f"{name}(...)"
