"""Changes of sizes to a rank's share: attributes, arguments, and reads of a layer's size."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import libcst as cst

from slapo_rewrite import errors
from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.placement import Placement, at_node
from slapo_rewrite.changes.places import AtNode, EndOfConstructor
from slapo_rewrite.changes.reads import in_forward, readings
from slapo_rewrite.changes.state import ShardedAttribute
from slapo_rewrite.code.build import bare, call, code, paren, parsed
from slapo_rewrite.code.syntax import end_position, extent
from slapo_rewrite.code.text import accessor
from slapo_rewrite.directive import Directive, merged_causes
from slapo_rewrite.model.layers import SHARES, Layer
from slapo_rewrite.model.tree import Node
from slapo_rewrite.sharding.tracked_sizes import Attribute
from slapo_rewrite.sharding.types import CALL, SIZES, ArgumentChange, ShardingResult, Statistic

# The keyword names of the sizes in `split`, `expand`, `view` and `reshape`.
_SIZES = ("split_size", "split_size_or_sections", "size", "sizes", "shape")
# The template for a list of sizes that must all be this rank's shares.
_LIST_OF_SHARES = "[{part_size}(size) for size in {argument}]"


@dataclass(frozen=True)
class ShardAttribute(Change):
    """At the end of the constructor: an integer attribute becomes this rank's share."""

    # The layer whose heads it counts, if these may be replicated on several ranks.
    layer: str | None = None

    @property
    def reads(self) -> str | None:
        """The layer."""
        return self.layer

    def write_at(self, text: ClassText, place: EndOfConstructor) -> None:
        """Inserts the assignment."""
        name = place.attribute
        function = text.helper("tensor_parallel", "part_size")
        times = f" * {accessor(self.layer)}.replicas" if self.layer else ""
        _at_end(text, place, f"self.{name} = {function}(self.{name}{times})")


@dataclass(frozen=True)
class DivideByReplicas(Change):
    """At the end of the constructor: an integer is divided among the ranks that share heads."""

    layer: str  # the layer whose heads they are

    @property
    def reads(self) -> str | None:
        """The layer."""
        return self.layer

    def write_at(self, text: ClassText, place: EndOfConstructor) -> None:
        """Inserts the division."""
        _at_end(text, place, f"self.{place.attribute} //= {accessor(self.layer)}.replicas")


@dataclass(frozen=True)
class ReadFullSize(Change):
    """Where other code reads a layer's size: the attribute with the full size instead."""

    attribute: str
    is_parallel = False

    def write_at(self, text: ClassText, place: AtNode) -> None:
        """Replaces the attribute's name."""
        for method in text.methods():
            for node in ast.walk(method):
                if (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.ctx, ast.Load)
                    and end_position(node) == place.at[2:]
                ):
                    why = f"the size of the whole `{ast.unparse(node.value)}`"
                    text.replace(node, lambda n: n.with_changes(attr=cst.Name(self.attribute)), why)


@dataclass(frozen=True)
class ChangeArgument(Change):
    """Changes an argument of a call in `forward`."""

    # The new text, with `{argument}` for the old one and `{part_size}` for that function's name.
    template: str
    # The index of the argument in the call, and of the element in it; negative ones from the end.
    index: tuple[int | str, ...]

    def write_at(self, text: ClassText, place: AtNode) -> None:
        """Replaces the argument; raises if it cannot be found in the call."""
        why = "what depends on the sharded size follows"
        for _, node in text.nodes_at(place):
            if self.index == (CALL,) and isinstance(node, ast.Call):
                why = f"`{self.template}` computes it, with its collectives"
                text.replace(node, lambda made: call(self.template, made.args[0].value), why)
                return
            if isinstance(node, ast.BinOp):
                continue
            if self.index[0] == SIZES and isinstance(node, ast.Call):
                text.replace(node, self._with_sizes, why)
                return
            argument, is_list = self._argument(node, text)
            if argument is None:
                continue
            statement = text.file.statement_of(node)
            if all(edit.node is not argument for edit, _, _ in text.at(statement).inside):
                written = self._written(node, argument, is_list, text)
                text.put(argument, written, why)
            return
        raise errors.UnfollowableSize(
            "an argument of this call depends on the sharded size, but cannot be told apart from "
            "the others",
            **text.where(place),
            hint="write the sizes out one by one, or keep them in integer attributes of the module",
        )

    def _with_sizes(self, made: cst.Call) -> cst.Call:
        """`y.view_as(x)` with one size unlike that of `x`: `y.view(*x.shape[:-1], -1)`."""
        method = cst.ensure_type(made.func, cst.Attribute)
        axis, other = int(self.index[1]), code(paren(made.args[0].value))
        sizes = [f"*{other}.shape[:{axis}]", self.template]
        sizes += [f"*{other}.shape[{axis + 1}:]"] if axis < -1 else []
        template = cst.ensure_type(parsed(f"view({', '.join(sizes)})"), cst.Call)
        name = cst.Name(method.attr.value.removesuffix("_as"))
        return made.with_changes(func=method.with_changes(attr=name), args=template.args)

    def _argument(
        self, node: ast.Call | ast.Subscript, text: ClassText
    ) -> tuple[ast.expr | None, bool]:
        """The argument, and whether it is a list as a whole."""
        if isinstance(node, ast.Subscript):
            keys = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            number, which = self.index
            key = keys[number] if isinstance(number, int) and number < len(keys) else None
            if not isinstance(key, ast.Slice):
                return None, False
            return (key.lower if which == "start" else key.upper), False
        arguments: list[ast.expr] = list(node.args)
        if (text.file.qualified(node.func) or "").startswith("torch."):
            arguments = arguments[1:]
        arguments += [k.value for k in node.keywords if k.arg in _SIZES]
        argument = _element(arguments, self.index[0])
        if len(self.index) == 1 or argument is None:
            return argument, False
        last = argument  # the list with the element, which is counted from the end
        if isinstance(argument, ast.BinOp) and isinstance(argument.op, ast.Add):
            last = argument if self._is_of_all else argument.right
        if isinstance(last, (ast.Tuple, ast.List)):
            return _element(last.elts, self.index[1]), False
        # To change one size of a list that is not written out, the list must have a name.
        return argument if self._is_of_all or _is_name(argument) else None, True

    @property
    def _is_of_all(self) -> bool:
        """Whether all elements of the list become shares, as the sizes of `split` do."""
        number = self.index[-1]
        return isinstance(number, int) and number >= 0

    def _written(
        self, node: ast.Call | ast.Subscript, argument: ast.expr, is_list: bool, text: ClassText
    ) -> str:
        template, function = self.template, ""
        if is_list:
            template = _LIST_OF_SHARES if self._is_of_all else self._among_others()
        if "{part_size}" in template:
            function = text.helper("tensor_parallel", "part_size")
        given = text.file.segment(argument)
        written = template.format(argument=given, part_size=function, own="{own}")
        if "{own}" not in written:
            return written
        # The tensor's own size, which is right for uneven parts as well.
        tensor = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            tensor = node.func.value
        if tensor is not None and _is_name(tensor):
            return written.replace("{own}", f"{text.file.segment(tensor)}.shape")
        sizes = text.helper("shards", "part_sizes")
        rank = text.helper("shards", "rank")
        return f"{sizes}({given})[{rank}()]"

    def _among_others(self) -> str:
        """The template of a list with one size changed, counted from its end."""
        number = self.index[-1]
        assert isinstance(number, int)
        behind = f", *{{argument}}[{number + 1}:]" if number < -1 else ""
        size = self.template.replace("{argument}", f"{{argument}}[{number}]")
        return f"(*{{argument}}[:{number}], {size}{behind})"


@dataclass(frozen=True)
class ParallelNormStatistic(Change):
    """Where a method computes a mean or variance of sharded features."""

    function: str  # the replacement
    parameter: str  # a parameter that is split along these features

    says = "whose parameters are split over the tensor-parallel group"

    def write_at(self, text: ClassText, place: AtNode) -> None:
        """Replaces the call, of a tensor's method or a function of torch."""
        for method, node in text.nodes_at(place):
            if not isinstance(node, ast.Call):
                continue
            named = (text.file.qualified(node.func) or "").startswith("torch.")
            is_function = named or isinstance(node.func, ast.Name)
            if not (node.args if is_function else isinstance(node.func, ast.Attribute)):
                continue
            name = text.helper("normalization", self.function)
            size = text.helper("normalization", "full_size")
            me = method.args.args[0].arg
            full = parsed(f'{size}({me}, "{self.parameter}")')

            def make(
                made: cst.Call, is_function: bool = is_function, name: str = name,
                full: cst.BaseExpression = full,
            ) -> cst.Call:  # fmt: skip
                args = list(made.args)
                if is_function:
                    value = args.pop(0).with_changes(comma=cst.MaybeSentinel.DEFAULT)
                else:
                    assert isinstance(made.func, cst.Attribute)
                    value = cst.Arg(bare(made.func.value))
                return made.with_changes(func=parsed(name), args=[value, cst.Arg(full), *args])

            why = f"over all ranks' parts of `{self.parameter}`"
            text.replace(node, make, why)
            return
        raise errors.UnfollowableSize(
            "this has to run over all ranks, but cannot be told apart from its neighbours",
            **text.where(place),
            hint="write it as a method of the tensor, `x.mean(-1)`",
        )


def _element(elements: Sequence[ast.expr], index: int | str) -> ast.expr | None:
    """An element by its index; None if a starred element makes the index ambiguous."""
    if not isinstance(index, int) or not -len(elements) <= index < len(elements):
        return None
    counted = elements[index:] if index < 0 else elements[: index + 1]
    return None if any(isinstance(e, ast.Starred) for e in counted) else elements[index]


def _is_name(node: ast.expr) -> bool:
    """Whether an expression is a variable or an attribute, which may be repeated."""
    plain = (ast.Name, ast.Attribute, ast.expr_context)
    return all(isinstance(inner, plain) for inner in ast.walk(node))


def _at_end(text: ClassText, place: EndOfConstructor, line: str) -> None:
    constructor = text.method("__init__")
    assert constructor is not None
    why = f"this rank's share of `{place.attribute}`"
    text.insert_after(constructor.body[-1], line, why, once=True)


def place_sizes(
    to: Placement, owners: Mapping[str, list[Directive]], holders: Mapping[str, Node]
) -> None:
    """Places the changes of sizes in modules that own sharded parameters, and below these."""
    followed = to.followed
    for path, holder in holders.items():
        cls, causes = to.tree.nodes[path].cls, merged_causes(owners[holder.path])
        home = to.files.constructing(cls) or to.files.making(to.tree.nodes[path])
        shared = _sharing(cls, followed)
        for attribute in sorted(followed.sizes | followed.repeats, key=lambda a: a.name):
            if attribute != Attribute(cls, holder.cls, attribute.name):
                continue
            what: Change = ShardAttribute(shared if attribute in followed.few else None)
            if attribute in followed.repeats and shared:
                what = DivideByReplicas(shared)
            home.changes.add(path, EndOfConstructor(attribute.name), what, causes)
    for path, state in to.states.items():
        for share in state.shares:
            _place_attribute(to, to.tree.nodes[path], share)
    for change in followed.arguments:
        _place_argument(to, change, owners, holders)


def _place_attribute(to: Placement, node: Node, share: ShardedAttribute) -> None:
    """Places the share of an attribute that the schedule itself names."""
    few = {(a.cls, a.name) for a in to.followed.few if a.requested}
    layer = _sharing(node.cls, to.followed) if (node.cls, share.name) in few else None
    home = to.files.constructing(node.cls) or to.files.making(node)
    place = EndOfConstructor(share.name)
    home.changes.add(node.path, place, ShardAttribute(layer), (share.cause,))


def _place_argument(
    to: Placement,
    change: ArgumentChange,
    owners: Mapping[str, list[Directive]],
    holders: Mapping[str, Node],
) -> None:
    """Places the change of an argument, in modules whose calls get shards."""
    place = change.place
    at = at_node("argument", place, change.index)
    home = to.files.at(place)
    paths = [
        path
        for path, node in to.tree.nodes.items()
        if any(home.classes.holds(c, place.line) for c in to.files.lineage(node.cls, home))
    ]
    if not paths:
        source = to.states.get(change.source or "")
        also = [s.cause.at for s in source.shards] if source else []
        where = "a function of no class"
        hint = "keep the size in an integer attribute of the module, and pass it"
        for name in home.file.classes:
            methods = [method.name for method in home.file.methods(name)]
            if home.classes.holds(name, place.line) and len(methods) > len({*methods}):
                where = f"`{name}`, which defines a method several times, but runs an earlier one"
                hint = "move the definition that runs to the end, or remove the others"
        raise errors.UnfollowableSize(
            f"this number would be a rank's share, but is in {where}",
            at=to.files.span(place),
            also=also[:1],
            hint=hint,
        )
    whole = to.followed.replicated_calls - to.followed.sharded_calls
    paths = [path for path in paths if (place, path) not in whole]
    below = [path for path in paths if path in holders]
    # Below owners of sharded parameters, attributes are shares and code that reads them is right.
    # If the change comes from an instance elsewhere, it is for the instances elsewhere.
    around = [path for path in paths if f"{change.source}.".startswith(f"{path}.")]
    if around and not {*around} & {*below}:
        below = [path for path in paths if path not in holders]
    for path in below or paths:
        causes = [s.cause for s in to.states[change.source].shards] if change.source else []
        causes = owners[holders[path].path] if path in holders else causes
        what = ChangeArgument(change.template, change.index)
        home.changes.add(path, at, what, merged_causes(causes))


def _sharing(cls: type, followed: ShardingResult) -> str | None:
    """A layer of a class whose heads may be replicated on several ranks."""
    return min((name for maker, name in followed.replicated if maker is cls), default=None)


def place_statistic(to: Placement, statistic: Statistic) -> None:
    """Places a mean or variance over all ranks."""
    place, name = statistic.place, statistic.parameter
    causes = [s.cause for s in to.states[statistic.owner].shards if s.name == name]
    change, at = ParallelNormStatistic(statistic.function, name), at_node("statistic", place)
    to.files.at(place).changes.add(statistic.owner, at, change, merged_causes(causes))


def place_full_sizes(to: Placement, node: Node, layer: Layer) -> None:
    """Places reads of the full size where other modules read the size of a sharded layer."""
    share, whole = SHARES[layer.name]
    if share == whole:
        return
    files = [output for output in to.files if f".{share}" in output.file.text]
    causes = tuple(s.cause for s in to.states[node.path].shards)
    _, *around = node.outwards() if files else [node]
    for above in around:
        home, relative = to.home(above), above.below(node.path)
        for reading in readings(home.classes, above.cls.__name__, relative, share):
            if whole is None and in_forward(home.classes, above.cls.__name__, reading):
                continue  # the analysis has followed the share in `forward`
            if whole is None:
                raise errors.UnfollowableSize(
                    f"{node.shown} is split, so its `{share}`, read here, is this rank's share",
                    at=home.file.at(reading),
                    cause=causes,
                    hint="read the size that the layer's constructor was given",
                )
            at = AtNode("read", extent(reading))
            home.changes.add(above.path, at, ReadFullSize(whole), causes)
