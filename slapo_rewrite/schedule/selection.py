"""Selects modules by path, and calls primitives on the selected modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any

from slapo_rewrite import errors, primitives
from slapo_rewrite.code.text import with_wildcards
from slapo_rewrite.directive import Share
from slapo_rewrite.model.path_patterns import alternatives, descend, split_pattern
from slapo_rewrite.model.tree import Node
from slapo_rewrite.schedule.plan import Plan


class Selection:
    """Modules of the model, in the order of the tree.

    `s[path]` selects by dotted path, relative to the current selection: `*` is one segment, `**`
    any number, `{a,b}` one of several. `s[i]` and `s[a:b:c]` index a module list; with
    fractions, `s[:0.5]`, the slice is a share of the list, whatever its length, rounded down.
    `s.match(regex)` selects by regular expression on the whole path. Every primitive is a method:
    `s["mlp.*"].shard("weight", axis=0)`.
    """

    def __init__(
        self, plan: Plan, nodes: list[Node], said: str = "s", shares: tuple[Share, ...] = ()
    ) -> None:
        self._plan, self._found, self._said, self._shares = plan, nodes, said, shares
        self._tree = plan.tree

    @property
    def _nodes(self) -> list[Node]:
        """The selected modules, in the tree of the source as changed so far."""
        now = self._plan.tree
        if self._tree is not now:
            gone = next((n.path for n in self._found if n.path not in now.nodes), None)
            if gone is not None:
                raise errors.UnknownPath(
                    f"`{gone}` was part of what has been rewritten", hint="select from `s` again"
                )
            self._found, self._tree = [now.nodes[n.path] for n in self._found], now
        return self._found

    def __getitem__(self, key: str | int | slice) -> Selection:
        if isinstance(key, str):
            return self._by_path(key)
        if isinstance(key, (int, slice)) and not isinstance(key, bool):
            return self._by_index(key)
        raise errors.BadArgument(
            f"modules are selected by path, index or slice, not by {type(key).__name__}"
        )

    def _by_path(self, pattern: str) -> Selection:
        found: dict[str, Node] = {}
        for single in alternatives(pattern):
            steps, before = split_pattern(single), len(found)
            for node in self._nodes:
                for match in descend(node, steps):
                    found[match.path] = match
            if len(found) == before and self._nodes:
                raise self._unknown(single)
        order = self._plan.order
        nodes = sorted(found.values(), key=lambda node: order[node.path])
        return self._inside(nodes, f'{self._said}["{pattern}"]')

    def _inside(self, nodes: list[Node], said: str) -> Selection:
        """A selection of modules below this one; it keeps the shares."""
        return Selection(self._plan, nodes, said, self._shares)

    def _unknown(self, pattern: str) -> errors.RewriteError:
        known: Iterable[str] = self._below()
        if "*" in pattern:  # answered in kind: one path for all layers, not each layer's own
            known = [with_wildcards(path) for path in known]
        return errors.UnknownPath(
            f"no module `{pattern}` below `{self._said}`",
            hint=self._indexed(pattern)
            or errors.did_you_mean(pattern, known)
            or _children_hint(self._nodes[0]),
        )

    def _indexed(self, pattern: str) -> str | None:
        """The hint for a path that contains an index, `layers.[0-3].up` as `tree` prints it."""
        found = re.fullmatch(r"([^\[]+?)\.?\[(\d+)(?:([-:])(\d+))?\](?:\.(.+))?", pattern)
        if found is None:
            return None
        path, first, to, last, inside = found.groups()
        index = f"{first}:{int(last) + (to == '-')}" if to else first
        rest = f'["{inside}"]' if inside else ""
        return f'elements are selected by an index: {self._said}["{path}"][{index}]{rest}'

    def _by_index(self, key: int | slice) -> Selection:
        ends = self._fractions(key) if isinstance(key, slice) else None
        if isinstance(key, slice) and ends is None:
            self._check_numbers(key)
        shown = key if isinstance(key, int) else _show_slice(key)
        nodes: list[Node] = []
        shares: list[Share] = []
        for node in self._nodes:
            if not node.is_container:
                raise errors.UnknownPath(
                    f"{node.shown} is a {node.cls.__name__}, not a module list: it has no index",
                    hint=_children_hint(node),
                )
            items = list(node.children.values())
            if ends is not None:
                shares.append(share := Share(node.path, *ends))
                taken = share.elements(len(items))
                nodes += items[taken.start : taken.stop]
                self._warn_of(share, len(taken), len(items))
                continue
            if isinstance(key, slice):
                picked = items[key]  # may be empty, as in `[:0]`, but must not start past the end
                exists = bool(picked) or key.start is None or key.start <= len(items)
            elif exists := -len(items) <= key < len(items):
                picked = [items[key]]
            if not exists:
                raise errors.UnknownPath(
                    f"{node.shown} has {len(items)} modules: there is no [{shown}]"
                )
            nodes += picked
        said = f"{self._said}[{shown}]"
        return Selection(self._plan, nodes, said, (*self._shares, *shares))

    def _check_numbers(self, key: slice) -> None:
        """Raises `BadArgument` for a slice that is not of whole numbers."""
        ends = (key.start, key.stop, key.step)
        if key.step == 0 or not all(end is None or type(end) is int for end in ends):
            raise errors.BadArgument(
                f"`{self._said}[{_show_slice(key)}]` is no slice of a list",
                hint="a slice takes integers, or fractions from 0.0 to 1.0",
            )

    def _fractions(self, key: slice) -> tuple[Fraction, Fraction] | None:
        """The ends of a slice by fractions, from 0 to 1; None for a slice by numbers."""
        ends = [end for end in (key.start, key.stop, key.step) if end is not None]
        if not any(isinstance(end, float) for end in ends):
            return None
        start = 0.0 if key.start is None else key.start
        stop = 1.0 if key.stop is None else key.stop
        hint = "a share has only fractions of a module list as bounds: [:0.5], [0.25:0.75]"
        if key.step is not None:
            wrong = "a share has no step"
        elif not all(isinstance(end, float) for end in ends):
            wrong = "a slice takes integers or fractions, not both"
            hint += "; all of it is 1.0"
        elif not 0 <= start <= stop <= 1:
            wrong = "the fractions of a share must increase, from 0.0 to 1.0"
        else:
            return _fraction(start), _fraction(stop)
        shown = f"{self._said}[{_show_slice(key)}]"
        raise errors.BadArgument(f"`{shown}`: {wrong}", hint=hint)

    def _warn_of(self, share: Share, taken: int, length: int) -> None:
        """Warns of a share that selects no or all elements: the output will, at every length."""
        how = "none" if not taken and share.start < share.stop else "all"
        if how == "all" and (taken < length or share.stop - share.start == 1):
            return
        words = (
            f"`{share}` takes {how} of {length} modules, so the output takes {how} of any number "
            "of them"
        )
        self._plan.warnings.append(errors.warning(words, self._plan.schedule.caller()))

    def match(self, regex: str) -> Selection:
        """The modules below the selection whose relative path the whole expression matches."""
        try:
            compiled = re.compile(regex)
        except (re.error, TypeError) as error:
            raise errors.BadArgument(f"`{regex}` is not a regular expression: {error}") from None
        below = self._below()
        nodes = [node for path, node in below.items() if compiled.fullmatch(path)]
        if not nodes and self._nodes:
            raise errors.UnknownPath(
                f"no module below `{self._said}` matches `{regex}`",
                hint=errors.did_you_mean(regex.replace("\\", ""), below),
            )
        return self._inside(nodes, f"{self._said}.match({regex!r})")

    def _below(self) -> dict[str, Node]:
        below: dict[str, Node] = {}
        for node in self._nodes:
            prefix = f"{node.path}." if node.path else ""
            for path, inner in self._plan.tree.nodes.items():
                if path.startswith(prefix) and path:
                    below.setdefault(path[len(prefix) :], inner)
        return below

    @property
    def paths(self) -> list[str]:
        """The selected module paths."""
        return [node.path for node in self._nodes]

    def __iter__(self) -> Iterator[Selection]:
        return (self._inside([n], f's["{n.path}"]') for n in self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, pattern: str) -> bool:
        patterns = [split_pattern(single) for single in alternatives(pattern)]
        return any(descend(node, steps) for steps in patterns for node in self._nodes)

    def __repr__(self) -> str:
        return f"<{self._said}: {len(self._nodes)} modules>"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        primitive = primitives.registry().get(name)
        if primitive is None:
            is_module = any(name in node.children for node in self._nodes)
            raise errors.UnknownPrimitive(
                f"there is no primitive `{name}`",
                hint=f'a module is selected by its path: {self._said}["{name}"]'
                if is_module
                else errors.did_you_mean(name, primitives.registry())
                or "the primitives are " + ", ".join(primitives.registry()),
            )

        def call(*args: Any, **kwargs: Any) -> Any:
            answer = self._plan.call(primitive, self._nodes, args, kwargs, self._shares)
            return self if answer is None else answer

        return call


def _children_hint(node: Node) -> str:
    names = list(node.children)
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"{node.shown} holds {shown}" if names else f"{node.shown} holds no modules"


def _fraction(end: float) -> Fraction:
    """The fraction that a float stands for: 1/3 if it is the float of that, else its decimals."""
    simple = Fraction(end).limit_denominator(100)
    return simple if float(simple) == end else Fraction(str(float(end)))


def _show_slice(key: slice) -> str:
    parts = ["" if v is None else str(v) for v in (key.start, key.stop)]
    return ":".join(parts) + (f":{key.step}" if key.step is not None else "")
