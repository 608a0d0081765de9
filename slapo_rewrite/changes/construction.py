"""Changes of construction sites: another class, for all elements or selected by index."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import libcst as cst

from slapo_rewrite import errors
from slapo_rewrite.changes.change import Change, PlacedChange
from slapo_rewrite.changes.class_text import ClassText
from slapo_rewrite.changes.elements import membership
from slapo_rewrite.changes.imports import Function, Imports
from slapo_rewrite.changes.late import Late
from slapo_rewrite.changes.places import AtSite, Place
from slapo_rewrite.changes.reads import cut_what_is_written
from slapo_rewrite.code.arguments import parameters
from slapo_rewrite.code.build import (
    call,
    code,
    conditional,
    expression,
    parsed,
    with_callee,
    with_keywords,
)
from slapo_rewrite.code.dataflow import names_in, uses_of
from slapo_rewrite.code.names import module_paths
from slapo_rewrite.directive import Causes
from slapo_rewrite.model.auto_classes import Lookup
from slapo_rewrite.model.construction_sites import Site
from slapo_rewrite.model.layers import Layer, Unit
from slapo_rewrite.runtime.weights import Concat, Original, Split, Transpose, Weight


@dataclass(frozen=True)
class Construction(Change):
    """Another class at a construction site."""

    order = 2

    # If the site calls a value, which may be another class in another configuration: the name in
    # the file of the class that it is here, and whether the value is a `partial` of that class.
    given: str = field(default="", kw_only=True)
    of_partial: bool = field(default=False, kw_only=True)

    @property
    def class_name(self) -> str:
        """The name of the other class, or of the user's function that makes it."""
        raise NotImplementedError

    @property
    def is_class(self) -> bool:
        """Whether the name is known to be a class's."""
        return True

    def group(self, place: Place) -> Hashable:
        """All elements that one site constructs are written together."""
        assert isinstance(place, AtSite)
        return Construction, place.start

    def made(self, original: cst.BaseExpression, site: Site, text: ClassText) -> cst.BaseExpression:
        """The replacement of the original construction."""
        raise NotImplementedError

    def becomes(self, site: Site) -> str:
        """The reason for the change, in a few words."""
        return f"`{site.path}` becomes a {self.class_name}"

    def held_by_variable(self, site: Site, text: ClassText) -> bool:
        """Whether the site calls a variable, whose assignment was changed instead."""
        return False

    def called(self, name: str, site: Site, text: ClassText) -> str:
        """What is called in the original's place: a class, with what a `partial` gives that."""
        if not self.of_partial or site.callee is None:
            return name
        given = [ast.unparse(site.callee), self.given, name]
        if isinstance(self, UseParallelLayer):
            given.append(text.helper("tensor_parallel", "single_rank_only"))
        return f"{text.helper('given_classes', 'with_class')}({', '.join(given)})"

    def write(self, text: ClassText, here: Sequence[PlacedChange]) -> None:
        """Changes what the site constructs, for all elements or by their indices."""
        changes: dict[str, Construction] = {}
        for placed in here:
            assert isinstance(placed.place, AtSite) and isinstance(placed.change, Construction)
            changes[placed.place.index] = placed.change
        assert isinstance(here[0].place, AtSite)
        site = text.classes.sites[here[0].place.start]
        present = text.indices.of(site)
        is_one = len(set(changes.values())) == 1 and present <= changes.keys()
        if is_one and self.held_by_variable(site, text):
            return
        if all(change.given and not change.of_partial for change in changes.values()):
            _choose_by_class(site, present, changes, text)
        elif is_one:
            text.replace(site.value, lambda n: self.made(n, site, text), self.becomes(site))
        else:
            told = _told_by_number(site, present, changes, text)
            text.replace(
                site.value,
                lambda node: _choice(node, told, site, text),
                f"choose the class of `{site.path}` by {told.by}",
            )

    def check_called(self, site: Site, text: ClassText, hint: str | None = None) -> None:
        """Raises `UnfollowableConstruction` unless the site is a call that names its class."""
        if site.kind in ("alias", "factory") or not isinstance(site.call, ast.Call):
            raise errors.UnfollowableConstruction(
                f"`{site.path}` is not constructed by a call that names its class",
                **text.where(site.value),
                hint=hint or "write the construction out: self.name = Class(...)",
            )


@dataclass(frozen=True)
class UseParallelLayer(Construction):
    """At a construction site: a tensor-parallel layer, or a subclass of it defined in this file."""

    layer: Layer
    subclass: str | None = None

    @property
    def class_name(self) -> str:
        """The layer's or the subclass's name."""
        return self.subclass or self.layer.name

    def becomes(self, site: Site) -> str:
        """The reason, with the layer's name."""
        return f"`{site.path}` becomes a {self.layer.name}"

    def write(self, text: ClassText, here: Sequence[PlacedChange]) -> None:
        """Constructs the layer, and cuts values that methods copy into its parameters."""
        super().write(text, here)
        assert isinstance(here[0].place, AtSite)
        site = text.classes.sites[here[0].place.start]
        if not site.loops:
            name = "weight" if self.layer.name.startswith("Row") else None  # the bias is whole
            cut_what_is_written(
                text, lambda node, method: site.path in module_paths(node, method), name
            )

    def made(self, original: cst.BaseExpression, site: Site, text: ClassText) -> cst.BaseExpression:
        """A call of the layer with the original's arguments, and its own."""
        self.check_called(site, text)
        name = self.subclass or text.helper(self.layer.module, self.layer.name)
        layer = self.layer
        if layer.unit and not layer.unit.required and self._made_above(site, text):
            layer = replace(layer, unit=None)  # the layer above checks the unit for both
        made = _call(original, self.called(name, site, text), site)
        return with_keywords(made, layer_keywords(layer, site, text))

    def _made_above(self, site: Site, text: ClassText) -> bool:
        """Whether the statements just above construct the same layer, under the same conditions."""
        sites, like = text.classes.sites, ast.dump(site.value)
        above = {*_made_just_above(site, {each.statement for each in sites.values()})}
        return any(
            text.wanted.get(AtSite(start)) == self and ast.dump(other.value) == like
            for start, other in sites.items()
            if other.statement in above
        )


@dataclass(frozen=True)
class ReplaceModule(Construction):
    """At a construction site: a class that the schedule names, or a subclass in this file."""

    target: Function  # the class
    arguments: str | None  # its constructor's arguments as source; None keeps the original's
    weights: tuple[tuple[str, Weight], ...] = ()  # how its tensors are made from the original's
    # The tensor-parallel layer to construct instead, if the module is sharded.
    layer: Layer | None = None
    subclass: str | None = None

    prefix = "Scheduled"
    is_parallel = False

    @property
    def class_name(self) -> str:
        """The name of the subclass, the layer, or the schedule's class or function."""
        return self.subclass or (self.layer.name if self.layer else self.target.name)

    @property
    def is_class(self) -> bool:
        """False for the schedule's name, which may be a function's."""
        return self.subclass is not None or self.layer is not None

    def becomes(self, site: Site) -> str:
        """The reason, with the class's name."""
        return f"`{site.path}` is replaced by {self.target.name}"

    def made(self, original: cst.BaseExpression, site: Site, text: ClassText) -> cst.BaseExpression:
        """A call of the class, inside `map_weights` with the original if its weights differ."""
        call = self._call(original, site, text)
        if not self.weights:
            return call
        reference = functools.partial(text.helper, "weights")
        weights = ", ".join(f'"{n}": {written(w, reference)}' for n, w in self.weights)
        return expression(
            f"{reference('map_weights')}(lambda: {{made}}, original=lambda: {{original}}, "
            "weights={weights})",
            made=call,
            original=original,
            weights=f"{{{weights}}}",
        )

    def _call(
        self, original: cst.BaseExpression, site: Site, text: ClassText
    ) -> cst.BaseExpression:
        elsewhere = site.kind == "alias"
        keywords = layer_keywords(self.layer, site, text) if self.layer else []
        if self.arguments is not None and not elsewhere:
            # The original may be any expression: a call of the class replaces it.
            made = parsed(f"{self._name(text)}({self.arguments})")
        else:
            hint = 'give the new module\'s own constructor arguments: replace(..., args="...")'
            self.check_called(site, text, None if elsewhere else hint)
            made = _call(original, self._name(text), site)
        return with_keywords(_call_of(made), keywords)

    def _name(self, text: ClassText) -> str:
        """The reference to the new class."""
        if self.subclass is not None:
            return self.subclass
        if self.layer is not None:
            return text.helper(self.layer.module, self.layer.name)
        return text.imports.function(self.target, text.causes)


@dataclass(frozen=True)
class UseSubclass(Construction):
    """At a construction site: a specialised class in place of the `original` one."""

    name: str  # the class
    original: str  # its base class, or the class itself
    # The output's module that defines it; None for the file with the construction site.
    module: str | None = None
    # Whether that module imports this file, so that its names exist only later.
    is_above: bool = False
    # How the site looks the original up, if it does not name it.
    lookup: Lookup | None = None
    # What the original is called where this is defined, if it makes no other state, so that an
    # object of the original can become one of it.
    same_state: str = ""
    recast: bool = False  # whether it does, since what makes it cannot be told the class

    is_parallel = False

    @property
    def class_name(self) -> str:
        """The subclass's name."""
        return self.name

    def made(self, original: cst.BaseExpression, site: Site, text: ClassText) -> cst.BaseExpression:
        """A call of the subclass, or of its class method."""
        if self.lookup is not None:
            return self._asked_for(self.lookup, _call_of(original), text)
        if self.recast:
            name = self.reference(text.imports, text.causes)
            known = replace(self, name=self.same_state).reference(text.imports, text.causes)
            helper = text.helper("given_classes", "as_subclass")
            return expression(f"{helper}({{made}}, {known}, {name})", made=original)
        self.check_called(site, text)
        unknown = site.partial is None and not self.given
        if unknown and any(isinstance(s.value, ast.Call) for s in assigned(site)):
            raise errors.UnfollowableConstruction(
                f"elements of `{site.path}` differ, and this call does not name `{self.original}` "
                "itself",
                **text.where(site.value),
                hint=f"write the construction out: {self.original}(...)",
            )
        name, callee = self.reference(text.imports, text.causes), site.callee
        if isinstance(callee, ast.Attribute):
            meaning = text.file.qualified(callee.value) or ""
            if meaning.rpartition(".")[2] == self.original:
                name = f"{name}.{callee.attr}"  # an alternative constructor
        return _call(original, self.called(name, site, text), site)

    def _asked_for(self, lookup: Lookup, original: cst.Call, text: ClassText) -> cst.BaseExpression:
        """The subclass for configurations that select the original, else the old expression."""
        callee = self.reference(text.imports, text.causes)
        if lookup.module is None:
            test = f'{lookup.config}.__name__ == "{lookup.name}"'
            return conditional(with_callee(original, callee), test, original)
        config = text.imports.function(Function(lookup.name, lookup.module), text.causes)
        callee += "._from_config"
        made = parsed(f"{callee}({lookup.arguments})")
        if lookup.arguments is None:
            made = with_callee(original, callee)
        return conditional(made, f"type({lookup.config}) is {config}", original)

    def reference(self, imports: Imports, causes: Causes) -> str:
        """The reference to the class in the file with the construction site."""
        if self.module is None:
            return self.name
        return imports.helper(self.module, self.name, causes, apart=self.is_above)

    def held_by_variable(self, site: Site, text: ClassText) -> bool:
        """Changes the assignment of the variable that the site calls, if it does call one."""
        callees = [n for n in ast.walk(site.function) if _is_same_name(n, site.callee)]
        if not site.variable or len(callees) > 1:  # it constructs other modules as well
            return False
        if self.of_partial and not _is_made_there(site):
            return False
        for statement in site.variable:
            for node in uses_of(statement, self.original):
                name = self.reference(text.imports, text.causes)
                text.put(node, name, self.becomes(site))
                text.at(site.statement).again = True
                return True
        return False


def layer_keywords(layer: Layer, site: Site, text: ClassText) -> list[tuple[str, str]]:
    """The layer's keyword arguments besides the original's, with its unit if there is one."""
    keywords = text.imports.keywords(layer, text.causes)
    if layer.unit is not None:
        keywords.append(("multiple_of", _unit(layer.unit, site, text)))
    return keywords


def _made_just_above(site: Site, making: Collection[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements right above a site that construct other modules, none of which it reads."""
    read = {node.attr for node in ast.walk(site.value) if isinstance(node, ast.Attribute)}
    body = site.file.block_of(site.statement)
    for statement in reversed(body[: body.index(site.statement)]):
        match statement:
            case ast.Assign(targets=[ast.Attribute(ast.Name("self"), name)]) if (
                statement in making and name not in read
            ):
                yield statement
            case _:
                return


def _unit(unit: Unit, site: Site, text: ClassText) -> str:
    """The expression of a unit at a site, whose attribute may be set only later."""
    attribute = re.match(r"self\.(\w+)", unit.text)
    if attribute is None:
        return unit.text
    if "self" not in parameters(site.function):
        raise unknown_unit(unit, site, text.causes)
    inside = unit.text[attribute.end() :]
    value = Late(text.file, site.function, site.statement).attribute(attribute[1])
    if value is not None and (not inside or re.fullmatch(r"[\w.]+", value)):
        return f"{value}{inside}"
    if inside and unit.size:  # only the value is known
        return str(unit.size)
    raise errors.UnfollowableConstruction(
        f"`{site.path}` must be split in multiples of `{unit.text}`, which is set later",
        **text.where(site.value),
        hint=f"set `{attribute[0]}` above `self.{site.path}`",
    )


def unknown_unit(unit: Unit, site: Site, causes: Causes) -> errors.RewriteError:
    """The error for a layer whose unit has no expression at its construction site."""
    return errors.UnfollowableConstruction(
        f"`{site.path}` must be split in multiples of `{unit.text}`, which "
        f"`{site.function.name}`, where it is constructed, does not know",
        at=site.file.at(site.value),
        cause=causes,
        hint=f"construct `self.{site.path}` in the constructor itself",
    )


def assigned(site: Site) -> list[ast.Assign]:
    """The assignments of the variable that a site calls."""
    return [statement for statement in site.variable if isinstance(statement, ast.Assign)]


def _call(original: cst.BaseExpression, callee: str, site: Site) -> cst.Call:
    """A call of another class with the original's arguments, including those of a `partial`."""
    if site.written_out is not None:
        original = parsed(ast.unparse(site.written_out))
    made = with_callee(_call_of(original), callee)
    if site.partial is None:
        return made
    args, keywords = site.arguments
    before = [cst.Arg(parsed(ast.unparse(a))) for a in args if a in site.partial.args]
    added = [(str(k.arg), ast.unparse(k.value)) for k in keywords if k in site.partial.keywords]
    return with_keywords(made.with_changes(args=[*before, *made.args]), added)


def _call_of(node: cst.BaseExpression) -> cst.Call:
    assert isinstance(node, cst.Call)
    return node


@dataclass(frozen=True)
class _Told:
    """The change of each element, and the tests that select them."""

    numbers: Mapping[Construction | None, set[int]]  # the elements with each change
    test: Callable[[set[int]], str]  # makes an expression that is true for these elements only
    by: str  # what `test` compares, in a word
    first_apart: bool = False  # whether element 0 has its own change and is in a share as well


def _told_by_number(
    site: Site, present: Collection[str], changes: Mapping[str, Construction], text: ClassText
) -> _Told:
    """The elements by their indices, or by shares of their number."""
    numbers: dict[Construction | None, set[int]] = {}
    level = _deciding(site, present, changes, text)
    for index in sorted(present, key=_numbers):
        numbers.setdefault(changes.get(index), set()).add(_numbers(index)[level])
    groups = list(numbers.values())
    innermost = level == -1
    regions = text.indices.regions(site, text.causes, groups, counted=True) if innermost else []
    first_apart = bool(regions) and not any(0 in region.numbers for region in regions)
    made = {_numbers(each)[level] for each in present}
    variable = _counter(site, text, level)

    def test(some: set[int]) -> str:
        return membership(variable, some, made, regions, site.count)

    return _Told(numbers, test, "share" if regions else "index", first_apart)


def _choose_by_class(
    site: Site, present: Collection[str], changes: Mapping[str, Construction], text: ClassText
) -> None:
    """`NewA(...) if kind is A and i < 6 else NewB(...) if kind is B and i < 6 else kind(...)`."""
    kinds = list(dict.fromkeys(changes.values()))
    tests, among = dict.fromkeys(kinds, ""), None
    is_one_each = len({kind.given for kind in kinds}) == len(kinds)
    if not is_one_each or not changes.keys() >= {*present}:
        # By number if there are several classes: a small model may have one of them in a share.
        told = _told_by_number(site, present, changes, text)
        every = set().union(*(told.numbers[kind] for kind in kinds))
        among = told.test(every)
        for kind in kinds:
            test = among if is_one_each else told.test(told.numbers[kind])
            tests[kind] = f" and ({test})" if " or " in test else f" and {test}"
    assert site.callee is not None
    called = ast.unparse(site.callee)

    def chosen(original: cst.BaseExpression) -> cst.BaseExpression:
        result = original
        if any(isinstance(kind, UseParallelLayer) for kind in kinds):
            # Another class is not split, and the values around it are parts.
            refused = call(text.helper("tensor_parallel", "single_rank_only"), original)
            result = refused if among is None else conditional(refused, among, original)
        for kind in reversed(kinds):
            test = f"{called} is {kind.given}{tests[kind]}"
            result = conditional(kind.made(original, site, text), test, result)
        return result

    text.replace(site.value, chosen, f"choose the class of `{site.path}` by what is called")


def _choice(
    original: cst.BaseExpression, told: _Told, site: Site, text: ClassText
) -> cst.BaseExpression:
    """`New(...) if i < 6 else Old(...)`."""
    by_text: dict[str, tuple[cst.BaseExpression, set[int]]] = {}
    unchanged = code(original)
    for change, numbers in told.numbers.items():
        node = original if change is None else change.made(original, site, text)
        by_text.setdefault(code(node), (node, set()))[1].update(numbers)
    # The most frequent choice comes last, or the original class if some elements keep it.
    order = sorted(by_text, key=lambda t: (t == unchanged, len(by_text[t][1])))
    if told.first_apart:  # a share may include element 0, so its test comes first
        order.sort(key=lambda t: by_text[t][1] != {0})
    result = by_text[order[-1]][0]
    for choice in reversed(order[:-1]):
        node, numbers = by_text[choice]
        result = conditional(node, told.test(numbers), result)
    return result


def _counter(site: Site, text: ClassText, level: int) -> str:
    """The variable that counts the elements; adds one to the innermost loop if it has none."""
    loop = site.loops[level] if len(site.loops) >= -level else None
    # An outer loop's variable counts the outer list's elements if there is one loop for each list.
    each = len(site.loops) == site.path.count("*")
    visible = level == -1 or each
    if loop and visible and loop.index and loop.index != "_":
        return loop.index
    refusal = errors.UnfollowableConstruction(
        f"elements of `{site.path}` differ, and nothing counts them where they are constructed",
        **text.where(site.value),
        hint="construct them in the order of the list, from the first one on"
        if loop is not None and (loop.counter or isinstance(loop.node, ast.comprehension))
        else "number them in the source: for i, ... in enumerate(...)",
    )
    if loop is None or len(site.loops) != 1:  # inner loops would repeat the count
        raise refusal
    node = loop.node
    if not isinstance(node, (ast.comprehension, ast.For)):
        raise refusal
    used = names_in(site.function)
    name = next(n for n in ("i", "index", "layer_index", "element_index") if n not in used)
    why = "count the elements"
    if loop.index == "_" and isinstance(node.target, ast.Name):
        text.replace(node.target, lambda _: cst.Name(name), why)
        return name
    if not loop.counts or isinstance(node, ast.For):
        raise refusal

    def counted(target: cst.BaseExpression) -> cst.BaseExpression:
        return expression(f"{name}, {{target}}", target=target).with_changes(lpar=[], rpar=[])

    text.replace(node.target, counted, why)
    text.replace(node.iter, lambda made: expression("enumerate({made})", made=made), why)
    return name


def _is_made_there(site: Site) -> bool:
    """Whether the variable that is called holds nothing but what the function itself makes."""
    came_in = not names_in(site.callee or site.call).isdisjoint(parameters(site.function))
    made = [isinstance(getattr(each, "value", None), ast.Call) for each in site.variable]
    return all(made) and not came_in


def _is_same_name(node: ast.AST, name: ast.expr | None) -> bool:
    """Whether two nodes read the same local variable."""
    if not isinstance(node, ast.Name) or not isinstance(name, ast.Name):
        return False
    return node.id == name.id and isinstance(node.ctx, ast.Load)


def _deciding(
    site: Site, present: Collection[str], changes: Mapping[str, Construction], text: ClassText
) -> int:
    """Which loop around a site decides its elements' changes, as a negative index from inside."""
    depth = max(len(_numbers(index)) for index in present)
    for level in range(-1, -depth - 1, -1):
        kinds: dict[int, set[Construction | None]] = {}
        for index in present:
            kinds.setdefault(_numbers(index)[level], set()).add(changes.get(index))
        if all(len(each) == 1 for each in kinds.values()):
            return level
    raise errors.UnfollowableConstruction(
        f"elements of `{site.path}` differ in a way that no single loop around this expresses",
        **text.where(site.value),
        hint="schedule all elements of one list alike, or construct each list where it has a name",
    )


def _numbers(index: str) -> tuple[int, ...]:
    """The numbers in an element's index, those of outer lists first."""
    return tuple(int(n) for n in index.split(".") if n.isdecimal()) or (0,)


def written(weight: Weight, reference: Callable[[str], str]) -> str:
    """The expression that makes a weight; `reference` returns the functions' names."""
    match weight:
        case Original(name):
            return f'"{name}"'
        case Concat(sources, axis):
            shown = ", ".join(written(source, reference) for source in sources)
            return f"{reference('concat')}({shown}{f', axis={axis}' if axis else ''})"
        case Split(source, parts, index, axis):
            place = f"parts={parts!r}, index={index}{f', axis={axis}' if axis else ''}"
            return f"{reference('split')}({written(source, reference)}, {place})"
        case Transpose(source):
            return f"{reference('transpose')}({written(source, reference)})"
    raise TypeError(f"not a weight: {weight!r}")
