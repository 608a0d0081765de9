"""Constructions whose class depends on a configuration: transformers' factories, properties."""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import dataclass
from typing import Any

from slapo_rewrite.code.facts import dotted
from slapo_rewrite.model.construction_sites import Site
from slapo_rewrite.model.join import called_root, known_site, looked_up, resolve
from slapo_rewrite.model.sources import Sources
from slapo_rewrite.model.tree import Node


@dataclass(frozen=True)
class Lookup:
    """A construction that looks its class up: `cls._from_config(...)` for one configuration class.

    Or a call of the class that a property of a configuration returns: `config.mlp_class(...)`.
    """

    config: str  # the configuration, or its property, as an expression
    name: str  # the configuration's class, or the class that the property returns
    module: str | None = None  # defines the configuration's class; None for a property
    # The arguments of `_from_config`, if they are not those of the construction.
    arguments: str | None = None


def lookup_of(site: Site, node: Node) -> Lookup | None:
    """How a construction looked up the class of a module; None if it did not.

    A property that is defined in another file can only return the original's class.

    `AutoModel.from_config(config, ...)`, like that of other auto classes, passes its arguments to
    `_from_config` of the class registered for `type(config)`; `load_backbone(config)` does so with
    `config.backbone_config`. None also for code from the hub, and for classes whose choice depends
    on more than the configuration's class, or that take a part of the configuration.
    """
    auto_factory: Any = sys.modules.get("transformers.models.auto.auto_factory")
    call, cls = site.value, type(getattr(node.live, "config", None))
    if not isinstance(call, ast.Call):
        return None
    if isinstance(call.func, ast.Attribute) and call.func.attr != node.cls.__name__:
        told = type(resolve(call.func.value, site, node))
        is_property = isinstance(inspect.getattr_static(told, call.func.attr, None), property)
        if is_property and told.__module__ != site.file.name:
            gives = resolve(call.func, site, node)
            return Lookup(ast.unparse(call.func), node.cls.__name__) if gives is node.cls else None
    if auto_factory is None or cls is type(None):
        return None
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    given = [*call.args, *(value for name, value in named.items() if name == "config")]
    clear = len(given) == 1 and isinstance(given[0], ast.Name | ast.Attribute)
    if not clear or not {None, "trust_remote_code"}.isdisjoint(named):
        return None
    config, arguments = given[0], None
    function: Any = resolve(call.func, site, node)
    if dotted(function) == "transformers.backbone_utils.load_backbone":
        auto: Any = sys.modules["transformers"].AutoBackbone
        config = ast.copy_location(ast.Attribute(config, "backbone_config", ast.Load()), config)
        arguments = ast.unparse(config)
    else:
        auto = getattr(function, "__self__", None)
        base = auto_factory._BaseAutoModelClass
        copied = getattr(function, "__code__", None) is base.from_config.__code__
        if not copied or not isinstance(auto, type) or not issubclass(auto, base):
            return None
    mapping = auto._model_mapping
    if cls not in mapping or mapping[cls] is not node.cls or node.cls.config_class is not cls:
        return None
    if type(resolve(config, site, node)) is not cls:
        return None
    return Lookup(ast.unparse(config), cls.__name__, cls.__module__, arguments)


def is_looked_up(sources: Sources, node: Node) -> bool:
    """Whether the class of a module or of an owner is defined here and looked up in another file.

    Lookups that `lookup_of` can write out do not count.
    """
    for holder in (node, *node.owners()):
        if holder.owner is not None and holder.cls.__module__ == sources.main.name:
            if (site := known_site(sources, holder)) is None:
                return False
            root = site.file.imports.get(called_root(site) or "")
            elsewhere = site.file is sources.main and looked_up(sources, holder, root)
            if elsewhere and lookup_of(site, holder) is None:
                return True
    return False
