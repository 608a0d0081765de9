"""Checks that the output's model, as a rank builds it, is the original apart from the schedule.

Classes and shards must be those that were asked for. A subclass's constructor runs the original's,
and makes some of its modules again: what the original did to these in between must hold for the new
ones as well. Values that a constructor reads from a sharded weight must be those of the full model.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.changes.output_files import OutputFiles, is_torch
from slapo_rewrite.changes.state import EMPTY, ModuleRequests, Replacement, Shard
from slapo_rewrite.code.text import joined_path
from slapo_rewrite.model import construction_calls
from slapo_rewrite.model.emitted import Emitted
from slapo_rewrite.model.join import Sources
from slapo_rewrite.model.layers import splits_of
from slapo_rewrite.model.short_build import LeftOut
from slapo_rewrite.model.tree import Node, Tree, build_model
from slapo_rewrite.model.uncalled import HOOKS, hooks_on
from slapo_rewrite.project import Project


@dataclass(frozen=True)
class BuiltOutput:
    """The output's model, with the original's and the schedule's requests."""

    emitted: Emitted  # the output
    built: Tree  # its module tree, of one rank of several
    project: Project  # the source, and the original's tree
    outputs: OutputFiles  # say the classes to be made, and attributes that are a rank's share
    states: Mapping[str, ModuleRequests]  # the requests for each module path

    def check(self) -> None:
        """Runs all checks; raises `Unsupported` if one fails."""
        self._check_classes()
        self._check_names()
        self._check_parts()
        self._check_kept()
        self._check_set()
        self._check_attributes()

    def _others(self) -> tuple[str, ...]:
        """The paths of modules that the schedule replaces, each with a final dot."""
        return tuple(f"{path}." for path, state in self.states.items() if state.replacement)

    def _check_classes(self) -> None:
        """Checks that exactly the modules that should get another class have it."""
        built, tree, states = self.built, self.project.tree, self.states
        made_in = list(self.outputs.made_in(tree))
        meant = {node.path: (made.class_name, why) for node, made, why in made_in}
        functions = {node.path for node, made, _ in made_in if not made.is_class}
        written = dict(meant.values())
        for path, node in tree.nodes.items():
            state = states.get(path, EMPTY)
            if path not in built.nodes or (path in functions and state.replacement is None):
                continue
            if _made_within(node, meant):
                continue  # a composite layer of torch is replaced with its submodules
            live = built.nodes[path].live
            cls = live.left if isinstance(live, LeftOut) else type(live)
            kinds = [base.__name__ for base in cls.__mro__]
            have, was = kinds[0], node.cls.__name__
            want, causes = meant.get(path, (was, written.get(have, ())))
            new = state.replacement
            if path in functions and new and (was in kinds or was != new.target.name):
                continue  # another class, which a factory function may have chosen
            is_own = path in meant or have in written or state.is_plain() or state.replacement
            if have != want and is_own:
                raise errors.Unsupported(
                    f"only some modules of class `{was}` should change, but the code that "
                    f"constructs them also constructs others, or moves them: `{path}` is a "
                    f"`{have}`, not a `{want}`",
                    at=causes[0].at if causes else None,
                    hint="schedule all of them alike, use a separate class for some, or construct "
                    "the elements of a list in their order",
                )

    def _check_parts(self) -> None:
        """Checks that each parameter to be sharded is, and that no shard is cut again."""
        others = self._others()
        for path, parts in self.emitted.parts.items():
            shards = {s.name: s for s in self.states[path].shards} if path in self.states else {}
            node = self.project.tree.nodes.get(path, self.built.nodes[path])
            own = {} if f"{path}.".startswith(others) else {**node.buffers, **node.parameters}
            for name in {**parts, **shards} if parts else ():
                have: Any = getattr(self.built.nodes[path].live, name, None)
                axis, size, full = parts.get(name, (0, None, None))
                if have is not None and have.shape[axis] != size:
                    what = f"is replaced by a whole tensor after `{node.name}` was constructed"
                    hint = f"create `{name}` in its constructor, and later change it in place"
                    raise _no_part(node, name, shards, what, hint)
                if name in own and own[name].shape[axis] != full:
                    what = "is computed from a rank's part, and would be cut a second time"
                    hint = f"compute `{name}` in `forward`, or leave its sources whole"
                    raise _no_part(node, name, shards, what, hint)

    def _check_names(self) -> None:
        """Checks that state dicts keep the names of sharded parameters, which loading needs."""
        tree, parts = self.project.tree, self.emitted.parts
        if not any(_names_anew(node.live) for node in tree.nodes.values()):
            return
        names = tree.root.live.state_dict().keys()
        for path in sorted(parts.keys() & tree.nodes.keys()):
            node = tree.nodes[path]
            for name in sorted(parts[path].keys() & node.parameters.keys()):
                if joined_path(path, name) not in names:
                    raise errors.Unsupported(
                        f"`{path}.{name}` is not in the model's state dict under this name, which "
                        "is needed to split and gather it",
                        at=construction_calls.place(construction_calls.stack_of(node.live)),
                        hint="keep the parameter's own name in `state_dict()`, and rename entries "
                        "where they are saved",
                    )

    def _check_set(self) -> None:
        """Checks that attributes set on a replaced module from outside hold for its replacement."""
        others = {path: s.replacement for path, s in self.states.items() if s.replacement}
        if not others:
            return
        make = self.project.schedule.module.model
        with construction_calls.sets_noted() as before:
            original = Tree(build_model(make, self.project.module))
        with construction_calls.sets_noted() as after:
            built = self.emitted.tree(make)
        for path, new in others.items():
            if path not in original.nodes or path not in built.nodes:
                continue
            own, other = original.nodes[path], built.nodes[path]
            if frozen := _unfrozen(own.live, other.live, new):
                raise _not_kept(own, f"its `{frozen}` is not frozen there")
            for node in own.walk():
                there = built.nodes.get(node.path)
                here = there.live if there is not None else None
                again = _set_on(here, other, after)
                for name in _set_on(node.live, own, before):
                    was, have = (getattr(each, name, None) for each in (node.live, here))
                    is_same = name in again if not _is_plain(was) else was == have
                    if not is_same and was is not have:
                        raise _not_kept(node, f"its `{name}` is {have!r} there, and was {was!r}")

    def _check_kept(self) -> None:
        """Checks that parameters exist and are frozen and tied as before, and hooks are kept."""
        built, tree, others = self.built, self.project.tree, self._others()
        for path, node in tree.nodes.items():
            live = built.nodes[path].live if path in built.nodes else None
            if live is None or isinstance(live, LeftOut):
                continue
            lost = _uncalled(node.live, live)
            if not f"{path}.".startswith(others):
                parts = self.emitted.parts.get(path, {})
                lost = lost or _lost(node.live, live) or _resized(node.live, live, parts)
            if lost:
                raise _not_kept(node, lost)
        for name, names in tree.ties.items():
            path = name.rpartition(".")[0]
            if not f"{path}.".startswith(others) and _is_untied(names, built):
                shown = "` and `".join(names[:2])
                raise _not_kept(tree.nodes[path], f"`{shown}` are no longer one parameter there")

    def _check_attributes(self) -> None:
        """Checks that plain attributes of modules are the original's, or a rank's share."""
        built, tree, others = self.built, self.project.tree, self._others()
        shares = self.outputs.shares_of(tree)

        def differing(other: Tree) -> Iterator[tuple[Node, str]]:
            for node, name in _other_values(tree, other):
                if name not in shares[node.path] and not f"{node.path}.".startswith(others):
                    yield node, name

        wrong = list(differing(built))
        if not wrong:
            return
        make = self.project.schedule.module.model
        again = Tree(build_model(make, self.project.module))
        drawn = {(n.path, name) for n, name in differing(again)}
        for node, name in wrong:
            if (node.path, name) not in drawn:
                lost = {(n.path, name) for n, name in differing(self.emitted.tree(make))}
                have, want = (getattr(t.nodes[node.path].live, name) for t in (built, tree))
                if (node.path, name) in lost:
                    raise _not_kept(node, f"its `{name}` is {have!r} there, and was {want!r}")
                raise _read_off(node, name, have, want, self.project.sources)


def _made_within(node: Node, meant: Collection[str]) -> bool:
    """Whether a module is inside a composite layer of torch that gets another class."""
    makers = itertools.takewhile(lambda owner: is_torch(owner.cls.__module__), node.owners())
    return any(owner.path in meant for owner in makers)


def _names_anew(live: Any) -> bool:
    """Whether a module may use other names in a state dict than its own."""
    methods = (type(live).state_dict, type(live)._save_to_state_dict)
    own = any(method.__module__ != "torch.nn.modules.module" for method in methods)
    return own or bool(live._state_dict_hooks)


def _no_part(
    node: Node, name: str, shards: Mapping[str, Shard], what: str, hint: str
) -> errors.RewriteError:
    causes = [s.cause for s in (shards.get(name), *shards.values()) if s is not None]
    at = construction_calls.last_set(node.live, name) or (causes[0].at if causes else None)
    message = f"`{joined_path(node.path, name)}` {what}"
    return errors.Unsupported(message, at=at, cause=causes, hint=hint)


def _uncalled(own: Any, other: Any) -> str | None:
    """What calls of the other module no longer do, as a message; None for nothing."""
    if "forward" in vars(own) and "forward" not in vars(other):
        return "it does not have the `forward` there that was set on it"
    if any(hooks_on(own, table) > hooks_on(other, table) for table in HOOKS):
        return "it does not have the hooks there that were registered on it"
    return None


def _set_on(live: Any, around: Node, sets: construction_calls.Sets) -> list[str]:
    """The names set on a module from outside of the constructors of `around` and its parts."""
    inside = {id(module) for module in around.live.modules()}
    noted = sets.get(live, ()) if live is not None else ()
    return [name for name, makers in noted if inside.isdisjoint(makers)]


def _unfrozen(own: Any, other: Any, new: Replacement) -> str | None:
    """A parameter of a new module that should be frozen like its source, but is not; or None."""
    frozen = {n for n, p in own.named_parameters(remove_duplicate=False) if not p.requires_grad}
    weights = dict(new.weights)
    for name, parameter in other.named_parameters(remove_duplicate=False):
        taken = weights[name].names() if name in weights else [name]
        if parameter.requires_grad and not frozen.isdisjoint(taken):
            return str(name)
    return None


def _lost(own: Any, other: Any) -> str | None:
    """How a parameter of the other module differs, as a message; None if none does."""
    for name, parameter in own._parameters.items():
        if name not in other._parameters:
            continue
        have = other._parameters[name]
        if have is None or parameter is None:
            if have is not parameter:
                return f"its `{name}` is {'left out' if have is None else 'back'} there"
        elif have.requires_grad != parameter.requires_grad:
            return f"its `{name}` is {'not ' if have.requires_grad else ''}frozen there"
    return None


def _resized(own: Any, other: Any, parts: Collection[str]) -> str | None:
    """Which tensor has another shape on a rank without being a shard, as a message; or None."""
    have: dict[str, Any] = {**other._parameters, **other._buffers}
    for name, tensor in {**own._parameters, **own._buffers}.items():
        there = have.get(name)
        if name in parts or tensor is None or there is None or there.shape == tensor.shape:
            continue
        shapes = f"{tuple(there.shape)} on a rank of two, and {tuple(tensor.shape)} whole"
        made = "is computed from something that is split, or depends on torch.distributed"
        return f"its `{name}` {made}: its shape is {shapes}"
    return None


def _is_untied(names: tuple[str, ...], built: Tree) -> bool:
    known = {name for name in names if name.rpartition(".")[0] in built.nodes}
    return len(known) > 1 and any(not known <= {*built.ties.get(n, ())} for n in known)


def _not_kept(node: Node, lost: str) -> errors.RewriteError:
    return errors.Unsupported(
        f"{node.shown} (`{node.cls.__name__}`) is not the original's in the output: {lost}",
        at=construction_calls.place(construction_calls.stack_of(node.live)),
        hint="set this in its own constructor, by an argument for example, or schedule all "
        "instances of the class that holds it alike",
    )


def _other_values(tree: Tree, other: Tree) -> Iterator[tuple[Node, str]]:
    for path, node in tree.nodes.items():
        if path not in other.nodes:
            continue
        # Sizes of sharded layers are a rank's own; code that reads them is checked elsewhere.
        is_layer = is_torch(node.cls.__module__) or splits_of(node.live) is not None
        own, others = vars(node.live), vars(other.nodes[path].live)
        for name in own.keys() & others.keys() - {"training"}:
            whole, here = own[name], others[name]
            if is_layer and not isinstance(whole, bool | float | str):  # may be a size
                continue
            if _is_plain(whole) and _is_plain(here) and whole != here:
                yield node, name


def _read_off(
    node: Node, name: str, have: object, want: object, sources: Sources
) -> errors.RewriteError:
    shown = joined_path(node.path, name)
    return errors.Unsupported(
        f"`{shown}` is {have!r} on a rank of two, and {want!r} in the whole model: its "
        "constructor computes it from something that is split, or from torch.distributed",
        at=_assigned_at(sources, node.cls, name),
        hint="compute it from the constructor's arguments, or set it after the model is built",
    )


def _assigned_at(sources: Sources, cls: type, name: str) -> errors.Span | None:
    for file, own in sources.classes(cls):
        constructor = file.method(own, "__init__")
        for node in ast.walk(constructor) if constructor is not None else ():
            match node:
                case ast.Attribute(attr=attribute, ctx=ast.Store()) if attribute == name:
                    return file.at(node)
    return None


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str) and value == value
