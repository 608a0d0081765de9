"""Finds registries that hold a model's classes by name and make its modules.

A decorator or a statement of its file registers a class: `@register("attention")`,
`@MODELS.register_module()`, `LAYERS["attention"] = Attention`. To make `build("attention", ...)` in
another file return a changed class, the output needs a registry of its own.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterable

from slapo_rewrite.changes.output_files import is_torch
from slapo_rewrite.code.dataflow import names_in
from slapo_rewrite.emit.imported_names import imported_names
from slapo_rewrite.model.auto_classes import lookup_of
from slapo_rewrite.model.join import called_root, known_site, looked_up
from slapo_rewrite.model.sources import Sources
from slapo_rewrite.model.tree import Node, Tree


def registered(sources: Sources, tree: Tree) -> dict[type, tuple[set[str], bool]]:
    """Maps registered classes to their registries' modules, and to whether a registry makes one."""
    nodes = [node for node in tree.nodes.values() if not is_torch(node.cls.__module__)]
    made = {node.cls for node in nodes if _is_looked_up(sources, node)}
    if not made:  # as in most models, whose decorators are not looked at then
        return {}
    homes = {cls: _registries(sources, cls) for cls in dict.fromkeys(n.cls for n in nodes)}
    return {cls: (modules, cls in made) for cls, modules in homes.items() if modules}


def _is_looked_up(sources: Sources, node: Node) -> bool:
    site = known_site(sources, node)
    root = site.file.imports.get(called_root(site) or "") if site is not None else None
    return site is not None and looked_up(sources, node, root) and lookup_of(site, node) is None


def _registries(sources: Sources, cls: type) -> set[str]:
    """The modules of the registries that the class's file registers the class in."""
    file = sources.file_of(cls)
    if file is None or cls.__name__ not in file.classes:
        return set()
    used = {n for each in file.classes[cls.__name__].decorator_list for n in names_in(each)}
    for statement in file.tree.body:
        if isinstance(statement, ast.Expr | ast.Assign):
            named = names_in(statement)
            used |= named if cls.__name__ in named else set()
    if not used & file.imports.keys():
        return set()
    targets = (module for name, (module, _) in imported_names(sources, file) if name in used)
    known = {name: vars(sys.modules[name]) for name in targets if name in sys.modules}
    return {name for name, space in known.items() if _holds(space.values(), cls)}


def _holds(values: Iterable[object], cls: type, depth: int = 2) -> bool:
    """Whether one of some values is, or has, a dict that maps a name to the class."""
    name = cls.__module__, cls.__name__  # where the source was run again, it is another class
    for value in values:
        if isinstance(value, types.ModuleType | types.FunctionType):
            continue
        held = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        inside = [*held.values()]
        classes = (each for each in inside if isinstance(each, type))
        if name in ((each.__module__, each.__name__) for each in classes):
            return True
        if depth and _holds(inside, cls, depth - 1):
            return True
    return False
