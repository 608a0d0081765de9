"""Finds the smallest run of statements of a method that contains certain calls, and obstacles."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from slapo_rewrite.code.arguments import values_given
from slapo_rewrite.code.blocks import DEFINITIONS, blocks, statements
from slapo_rewrite.code.dataflow import assigned_in, bound_in
from slapo_rewrite.code.effects import is_in_place
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.syntax import position
from slapo_rewrite.code.text import within


@dataclass(frozen=True)
class Calls:
    """Calls of one method, and the run of statements around them."""

    method: ast.FunctionDef
    run: tuple[ast.stmt, ...]  # consecutive statements of one block
    calls: tuple[ast.Call, ...]  # in the order of the text

    @property
    def is_single(self) -> bool:
        """Whether this is one call in a simple statement."""
        return len(self.calls) == 1 and len(self.run) == 1 and not hasattr(self.run[0], "body")


def called_names(method: ast.FunctionDef) -> Iterator[tuple[str, ast.Call]]:
    """The calls of a method by name.

    `self.mlp.act(x)` has the name `mlp.act`, and `self.layer[0](x)` has `layer.0`. Other calls have
    the name that the code writes, such as `F.dropout` or `layer`.
    """
    for node in ast.walk(method):
        if isinstance(node, ast.Call) and (name := _name(node.func)):
            yield name, node


def _name(function: ast.expr) -> str | None:
    steps: list[str] = []
    while not isinstance(function, ast.Name):
        match function:
            case ast.Attribute(value=value, attr=attr):
                steps.append(attr)
            case ast.Subscript(value=value, slice=index):
                try:
                    steps.append(str(ast.literal_eval(index)))
                except ValueError:
                    return None
            case _:
                return None
        function = value
    if function.id != "self":
        steps.append(function.id)
    return ".".join(reversed(steps)) or None


def find_calls(method: ast.FunctionDef, wanted: str | tuple[str, ...]) -> Calls | None:
    """A method's calls of some names, or of those that match, with the statements around them."""
    found = [
        call
        for name, call in called_names(method)
        if (name in wanted if isinstance(wanted, tuple) else re.fullmatch(wanted, name))
    ]
    if not found:
        return None
    found.sort(key=position)
    return Calls(method, tuple(_around(method.body, found)), tuple(found))


def _around(body: list[ast.stmt], calls: list[ast.Call]) -> list[ast.stmt]:
    """The smallest run of statements of one block that contains all calls."""
    holding = [
        number
        for number, statement in enumerate(body)
        if any(within(statement, call) for call in calls)
    ]
    run = body[holding[0] : holding[-1] + 1]
    if len(run) == 1:
        for block in blocks(run[0]):
            if all(any(within(s, call) for s in block) for call in calls):
                return _around(block, calls)
    return run


# Random number functions other than torch's, and those that take the system's entropy if they get
# no seed. (So do generator classes, which have capitalised names.)
_OTHER_RANDOM = ("random.", "numpy.random.", "np.random.")
_SEEDED = ("seed", "default_rng")
_NEVER_AGAIN = ("time.", "secrets.", "uuid.", "os.urandom", "torch.seed", "torch.random.seed")
APART = "name only calls before or after it"
OF_TORCH = ("torch", "F", "nn")
# Methods that switch a module's mode; a recomputation may stop before the mode is switched back.
SWITCHING = ("eval", "train")
# Methods that change a value in place, besides those with a trailing underscore.
MUTATING = {
    *SWITCHING,
    *("append", "appendleft", "clear", "extend", "insert", "pop", "popitem", "popleft", "remove"),
    *("reverse", "setdefault", "update"),
}


@dataclass(frozen=True)
class Obstacle:
    """The reason why statements cannot become a method that runs twice."""

    node: ast.stmt | ast.expr  # the offending statement or expression
    words: str  # what it does
    hint: str  # how to avoid it


def obstacle(run: tuple[ast.stmt, ...], inputs: Iterable[str]) -> Obstacle | None:
    """The first statement in a run that leaves the run, or changes its inputs in place."""
    given = {"self", *inputs}
    for statement in statements(run):
        if (found := _leaving(run, statement)) or (found := _changing(statement, given)):
            return found
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement in run:
            # From here on, the name has a value of the run's own.
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            given -= {t.id for t in targets if isinstance(t, ast.Name)}
    return None


def change_of_given(method: ast.FunctionDef, given: set[str]) -> Obstacle | None:
    """The first statement in a method that changes one of the arguments `given` in place."""
    return _change_and_given(method.body, given)[0]


def _change_and_given(
    body: Iterable[ast.stmt], given: set[str]
) -> tuple[Obstacle | None, set[str]]:
    """The first change of an argument in a block, and the names of arguments after the block."""
    for statement in body:
        if found := _changing(statement, given):
            return found, given
        if isinstance(statement, ast.Assign):
            # The targets become aliases of arguments, or stop being such.
            before = given
            for target, bound_to in assigned_in(statement):
                value = bound_to or statement.value
                means_it = root_of(value) in before and not is_size(value)
                given = given | bound_in(target) if means_it else given - bound_in(target)
        inner = () if isinstance(statement, DEFINITIONS) else blocks(statement)
        ends = [_change_and_given(block, given) for block in inner]
        for found, _ in ends:
            if found:
                return found, given
        # On some path around a block, names may still mean arguments.
        is_past = isinstance(statement, ast.With) or bool(getattr(statement, "orelse", ()))
        given = set().union(*(left for _, left in ends), () if ends and is_past else given)
    return None, given


def varying(file: SourceFile, nodes: Iterable[ast.AST]) -> Obstacle | None:
    """The first expression that has another value each time it runs.

    The random states of torch, Python and NumPy are restored for a recomputation. Those of a
    generator or the system are not, nor is an iterator that outlives the statements. A TorchScript
    function saves other tensors at its first call than later, which makes torch's gradients wrong.
    """
    nodes = list(nodes)
    own = bound_in(*nodes)
    for node in (inner for each in nodes for inner in ast.walk(each)):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and _is_scripted(file, node.func.id):
            words = f"calls `{node.func.id}`, which TorchScript compiles: and the first gradients"
            return Obstacle(node, f"{words} would be wrong", "leave out `@torch.jit.script`")
        name = file.qualified(node.func) or ast.unparse(node.func)
        taken = [k.value for k in node.keywords if k.arg == "generator"]
        if name == "next":
            taken += node.args[:1]
        if (
            name.startswith(_NEVER_AGAIN)
            or _is_unseeded(node, name)
            or any((root := root_of(value)) and root not in own for value in taken)
        ):
            words = f"reads `{ast.unparse(node)}`, which differs the second time"
            return Obstacle(node, words, "draw with torch, without a generator, or outside of it")
    return None


def _is_unseeded(call: ast.Call, name: str) -> bool:
    """Whether a call creates or seeds a random generator from the system's entropy."""
    last = name.rpartition(".")[2]
    given = [ast.unparse(each) for each in values_given(call)]
    is_begun = last in _SEEDED or last[0].isupper()
    return name.startswith(_OTHER_RANDOM) and is_begun and given in ([], ["None"])


def draw_beside_torch(file: SourceFile, function: ast.FunctionDef) -> ast.expr | None:
    """The first mention of Python's or NumPy's random functions in a function."""
    named = (n for n in ast.walk(function) if isinstance(n, ast.Attribute | ast.Name))
    return next(
        (n for n in named if (file.qualified(n) or ast.unparse(n)).startswith(_OTHER_RANDOM)), None
    )


def _is_scripted(file: SourceFile, name: str) -> bool:
    """Whether a function of the file is compiled by TorchScript."""
    made = file.functions.get(name)
    decorators = made.decorator_list if made else []
    return "torch.jit.script" in [file.qualified(decorator) for decorator in decorators]


def is_size(value: ast.expr) -> bool:
    """Whether an expression is metadata of a tensor: a size, dtype or device."""
    found = (n.attr for n in ast.walk(value) if isinstance(n, ast.Attribute))
    return bool({"shape", "ndim", "dtype", "device"} & {*found})


def _leaving(run: tuple[ast.stmt, ...], statement: ast.stmt) -> Obstacle | None:
    if isinstance(statement, ast.Return) and statement is not run[-1]:
        return Obstacle(statement, "returns from the middle", APART)
    if isinstance(statement, ast.Break | ast.Continue) and not any(
        isinstance(loop, ast.For | ast.AsyncFor | ast.While)
        and any(statement is inner for block in blocks(loop) for inner in statements(block))
        for loop in statements(run)
    ):
        return Obstacle(statement, "leaves a loop around it", APART)
    if isinstance(statement, ast.Global | ast.Nonlocal):
        return Obstacle(statement, "binds names elsewhere", APART)
    for node in own_nodes(statement):
        if isinstance(node, ast.Yield | ast.YieldFrom | ast.Await):
            return Obstacle(node, "suspends the method", APART)
    return None


def _changing(statement: ast.stmt, given: set[str]) -> Obstacle | None:
    found = changing(statement, lambda node: root if (root := root_of(node)) in given else None)
    return replace(found, words=f"{found.words}, and would do so twice") if found else None


def changing(statement: ast.stmt, root: Callable[[ast.expr], str | None]) -> Obstacle | None:
    """The first in-place change of a protected value in a statement, without its blocks.

    `root` returns the name of the protected value that an expression is part of, or None.
    """
    words = "changes `{}` in place"
    if isinstance(statement, ast.AugAssign) and root(statement.target):
        shown = ast.unparse(statement.target)
        operator = ast.unparse(statement).removeprefix(shown).split("=")[0].strip()
        value = ast.unparse(statement.value)
        is_name = isinstance(statement.target, ast.Name)
        hint = f"write `{shown} = {shown} {operator} {value}`" if is_name else APART
        return Obstacle(statement, words.format(shown), hint)
    for node in own_nodes(statement):
        match node:
            case (
                ast.Attribute(value=changed, ctx=ast.Store() | ast.Del())
                | ast.Subscript(value=changed, ctx=ast.Store() | ast.Del())
            ) if root(changed):
                return Obstacle(node, words.format(ast.unparse(node)), APART)
            case ast.Call():
                its, hint = _changed_by(node, root)
                if its is not None:
                    return Obstacle(node, words.format(ast.unparse(its)), hint)
    return None


def _changed_by(
    call: ast.Call, root: Callable[[ast.expr], str | None]
) -> tuple[ast.expr | None, str]:
    """The value that a call changes in place by its name or `out`, `inplace`, and a hint."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    is_marked = is_in_place(name)
    for keyword in call.keywords:
        if keyword.arg == "out" and root(keyword.value):
            return keyword.value, "remove `out=`"
        is_on = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        if keyword.arg == "inplace" and is_on and call.args and root(call.args[0]):
            return call.args[0], "remove `inplace`"
    if isinstance(call.func, ast.Attribute) and (is_marked or name in MUTATING):
        hint = APART if name in MUTATING else f"call `{name.rstrip('_')}`, or {APART}"
        if root(call.func.value):
            return call.func.value, hint
        if is_marked and root_of(call.func) in OF_TORCH:
            # `torch.relu_(x)`, or of a list of tensors
            first = next(iter(values_given(call)), None)
            parts = first.elts if isinstance(first, ast.List | ast.Tuple) else [first]
            return next((part for part in parts if part is not None and root(part)), None), hint
    return None, ""


def root_of(node: ast.expr) -> str | None:
    """The variable that an attribute or element expression starts from, or that of its `type()`."""
    while True:
        match node:
            case ast.Attribute(value=value) | ast.Subscript(value=value):
                node = value
            case ast.Call(func=ast.Name("type"), args=[of]):
                node = of
            case _:
                return node.id if isinstance(node, ast.Name) else None


def own_nodes(statement: ast.stmt) -> tuple[ast.expr, ...]:
    """The expressions of a statement, without those of its blocks and inner functions."""
    # Cached: a method is analysed again for each module that may call it.
    if (known := _OWN.get(statement)) is None:
        known = _OWN[statement] = tuple(_own_nodes(statement))
    return known


_OWN: WeakKeyDictionary[ast.stmt, tuple[ast.expr, ...]] = WeakKeyDictionary()


def _own_nodes(statement: ast.stmt) -> Iterator[ast.expr]:
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.expr):
            yield node
        waiting += [
            child
            for child in ast.iter_child_nodes(node)
            if not isinstance(child, ast.stmt | ast.Lambda | ast.excepthandler | ast.match_case)
        ]
