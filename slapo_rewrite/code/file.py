"""One source file, read with `ast` only: its definitions, its imports, and positions of nodes."""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from slapo_rewrite import errors
from slapo_rewrite.code.blocks import blocks, statements
from slapo_rewrite.code.liveness import binds
from slapo_rewrite.code.locate import module_name, near_files, package_for
from slapo_rewrite.code.syntax import PLACED, encloses, extent
from slapo_rewrite.code.text import Position, bound_by

_LINE_END = re.compile(r"\r\n|\r|\n")
_CODING = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_UTF8 = {"utf-8", "utf8", "utf-8-sig", "utf_8", "u8", "ascii", "us-ascii"}


class SourceFile:
    r"""A Python file and an index of its module level.

    Attributes:
        path: The file.
        display: The path as shown to the user.
        name: The dotted name of the module.
        package: The package that its relative imports are relative to; '' for a file on its own.
        text: The file's characters, without its byte order mark. Line ends are `\n`, unless the
            file mixes several kinds.
        bom: The byte order mark at the beginning of the file, or ''.
        line_end: The file's line end, which `text` has as `\n`.
        tree: The syntax tree of `text`.
        classes: Classes of the module level, including those under `if` and `try`.
        several: The names of classes that it defines more than once.
        functions: Functions of the module level, likewise.
        imports: Local alias -> absolute dotted name.
        names: Every name that the module level binds.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        text: str,
        tree: ast.Module,
        bom: str = "",
        line_end: str = "\n",
        line_length: int | None = None,
    ) -> None:
        self.bom, self.line_end = bom, line_end
        self._line_length = line_length
        self.path = path
        self.display = str(path)
        self.name = name
        self.package = package_for(path, name)
        self.text = text
        self.tree = tree
        self.classes: dict[str, ast.ClassDef] = {}
        self.several: set[str] = set()
        self.functions: dict[str, ast.FunctionDef] = {}
        self.imports: dict[str, str] = {}
        self.names: set[str] = set()
        self._index()

    @classmethod
    def read(cls, path: Path, name: str | None = None) -> SourceFile:
        """Reads and parses a file.

        Without a `name` its dotted module name is made from the packages around it.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise errors.SourceError(
                f"cannot read `{path}`: {error.strerror or error}", hint=near_files(path)
            ) from error
        text = _decode(data, path)
        bom = "\ufeff" if text.startswith("\ufeff") else ""
        text = text.removeprefix(bom)
        end = line_end(text) or "\n"
        text = text.replace(end, "\n")
        return cls(path, name or module_name(path), text, _parse(text, path), bom, end)

    def edited(self, text: str) -> SourceFile:
        """The same file with another text."""
        own = (self.bom, self.line_end, self.line_length)
        return SourceFile(self.path, self.name, text, self.parsed(text), *own)

    def parsed(self, text: str) -> ast.Module:
        """The syntax tree of another text of the file."""
        return _parsed(text, self)

    def as_stored(self, text: str) -> str:
        """A text with this file's byte order mark and line ends, for writing."""
        return self.bom + text.replace("\n", self.line_end)

    def __repr__(self) -> str:
        return f"SourceFile({self.display!r}, {self.name!r})"

    @property
    def line_length(self) -> int:
        """The line length of the file as it was read; edits do not change it."""
        if self._line_length is None:
            self._line_length = line_length(self.text)
        return self._line_length

    # Places ---------------------------------------------------------------------------------

    @functools.cached_property
    def _starts(self) -> list[int]:
        # `str.splitlines` also splits at form feeds and U+2028, which do not end lines of Python.
        return [0, *(m.end() for m in _LINE_END.finditer(self.text)), len(self.text)]

    @functools.cached_property
    def _ascii(self) -> bool:
        return self.text.isascii()

    def line(self, number: int) -> str:
        """Line `number` (1-based) without its line end."""
        if not 1 <= number < len(self._starts):
            return ""
        return self.text[self._starts[number - 1] : self._starts[number]].rstrip("\r\n")

    def offset(self, line: int, col_utf8: int) -> int:
        """The character offset into `text` of a position of `ast`.

        Lines count from 1, columns from 0 and in UTF-8 bytes.
        """
        start = self._starts[line - 1]
        if self._ascii:
            return start + col_utf8
        chars = self.text[start : self._starts[line]]
        return start + len(chars.encode()[:col_utf8].decode(errors="ignore"))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The character offsets of a node's beginning and end."""
        line, column, last, end = extent(node)
        return self.offset(line, column), self.offset(last, end)

    def segment(self, node: ast.AST) -> str:
        """The text of a node in the file."""
        begin, end = self.span(node)
        return self.text[begin:end]

    def at(self, node: ast.AST, note: str = "") -> errors.Span:
        """The place of a node for a diagnostic, with carets under its first line."""
        return self.shown(extent(node), note)

    def shown(self, at: Position, note: str = "") -> errors.Span:
        """A position as a place for a diagnostic."""
        return errors.Span.of_bytes(self.display, at, self.line(at[0]), note)

    @functools.cached_property
    def statements(self) -> list[ast.stmt]:
        """Every statement of the file, each before those inside it."""
        return list(statements(self.tree.body, enter=True))

    @functools.cached_property
    def _extents(self) -> dict[ast.stmt, Position]:
        return {statement: extent(statement) for statement in self.statements}

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that contains a node of the file."""
        at = extent(node)
        return [s for s, place in self._extents.items() if encloses(place, at)][-1]

    def holding(self, at: Position) -> list[ast.AST]:
        """The nodes of the file that contain a position, the outermost first."""
        return _holding(self.tree, at)

    @functools.cached_property
    def _parents(self) -> dict[ast.AST, ast.AST]:
        return {child: n for n in ast.walk(self.tree) for child in ast.iter_child_nodes(n)}

    def around(
        self, node: ast.AST, within: ast.AST | None = None
    ) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Pairs of a child and its parent, from a node of the file outwards.

        Stops before the parent `within`, if given.
        """
        while (outer := self._parents.get(node)) is not within and outer is not None:
            yield node, outer
            node = outer

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """The block that contains a statement of the file."""
        return next(block for block in blocks(self._parents[statement]) if statement in block)

    # Names ----------------------------------------------------------------------------------

    def qualified(self, expr: ast.expr) -> str | None:
        """The absolute dotted name of a name or attribute expression at module level.

        None for other expressions, and for names that the module level does not bind.
        """
        tail: list[str] = []
        while isinstance(expr, ast.Attribute):
            tail.append(expr.attr)
            expr = expr.value
        if not isinstance(expr, ast.Name):
            return None
        if expr.id in self.classes or expr.id in self.functions:
            head = f"{self.name}.{expr.id}"
        elif expr.id in self.imports:
            head = self.imports[expr.id]
        elif expr.id in self.names:
            head = f"{self.name}.{expr.id}"
        else:
            return None
        return ".".join([head, *reversed(tail)])

    def method(self, class_name: str, method_name: str) -> ast.FunctionDef | None:
        """A method in the class's own body; the last of several, which Python calls."""
        return next((m for m in reversed(self.methods(class_name)) if m.name == method_name), None)

    def methods(self, class_name: str) -> list[ast.FunctionDef]:
        """The methods in the class's own body, without setters, deleters and overloads."""
        body = self.classes[class_name].body if class_name in self.classes else []
        return [
            s for s in statements(body) if isinstance(s, ast.FunctionDef) and not _is_companion(s)
        ]

    def _index(self) -> None:
        for statement in statements(self.tree.body):
            match statement:
                case ast.ClassDef():
                    if statement.name in self.classes:
                        self.several.add(statement.name)
                    self.classes[statement.name] = statement
                    self.names.add(statement.name)
                case ast.FunctionDef():
                    self.functions[statement.name] = statement
                    self.names.add(statement.name)
                case ast.AsyncFunctionDef():
                    self.names.add(statement.name)
                case ast.Import():
                    for alias in statement.names:
                        local = bound_by(alias)
                        self.imports[local] = alias.name if alias.asname else local
                case ast.ImportFrom():
                    base = self.resolve_import(statement)
                    for alias in statement.names:
                        if alias.name != "*":
                            self.imports[alias.asname or alias.name] = f"{base}.{alias.name}"
                case _:
                    self.names.update(binds(statement))
        self.names.update(self.imports)

    def resolve_import(self, statement: ast.ImportFrom) -> str:
        """The absolute module name that a `from ... import` statement imports from."""
        if not statement.level:
            return statement.module or ""
        parts = self.package.split(".") if self.package else []
        parts = parts[: len(parts) - statement.level + 1] if statement.level > 1 else parts
        return ".".join([*parts, statement.module] if statement.module else parts)


def read_once(path: Path, name: str) -> SourceFile:
    """Reads a file; cached until the file changes on disk."""
    state = path.stat()
    return _read_once(path, name, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=64)
def _read_once(path: Path, name: str, _changed: int, _size: int) -> SourceFile:
    return SourceFile.read(path, name)


def line_length(text: str) -> int:
    """The line length of a text: the smallest common limit that its code does not exceed."""
    longest = max(
        (len(line) for line in lines_of(text) if "#" not in line and '"' not in line), default=0
    )
    return next((limit for limit in (88, 100, 119, 120) if longest <= limit), 120)


def line_end(text: str) -> str | None:
    """The line end of a text; None if it mixes several, or has none."""
    ends = {*_LINE_END.findall(text)}
    return ends.pop() if len(ends) == 1 else None


def lines_of(text: str) -> list[str]:
    """The lines of a text as Python counts them: form feeds and the like do not end a line."""
    return [line.rstrip("\r") for line in text.split("\n")]


def _decode(data: bytes, path: Path) -> str:
    for head in data.splitlines()[:2]:
        coding = _CODING.match(head)
        if coding and coding.group(1).decode().lower() not in _UTF8:
            raise errors.SourceError(
                f"`{path}` declares the encoding `{coding.group(1).decode()}`",
                hint="save the file as UTF-8 and drop the declaration",
            )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        start = data.rfind(b"\n", 0, error.start) + 1
        end = data.find(b"\n", error.start)
        text = data[start : end if end >= 0 else len(data)].decode(errors="replace")
        column = len(data[start : error.start].decode(errors="replace")) + 1
        raise errors.SourceError(
            f"byte 0x{data[error.start]:02x} is not UTF-8",
            at=errors.Span(str(path), line, column, 1, text.rstrip("\r")),
            hint="save the file as UTF-8",
        ) from error


def _parse(text: str, path: Path) -> ast.Module:
    null = text.find("\0")
    if null >= 0:
        line = text.count("\n", 0, null) + 1
        start = text.rfind("\n", 0, null) + 1
        raise errors.SourceError(
            "source code cannot contain null bytes",
            at=errors.Span(str(path), line, null - start + 1),
        )
    try:
        return _tree(text, path)
    except SyntaxError as error:
        raise errors.SourceError(
            f"the source does not parse: {error.msg}", at=_syntax_place(error, path)
        ) from error
    except (RecursionError, MemoryError) as error:
        raise errors.SourceError(f"`{path}` is nested too deeply to parse") from error


def _tree(text: str, path: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in the user's source
        return ast.parse(text, str(path))


@functools.lru_cache(maxsize=2)
def _parsed(text: str, file: SourceFile) -> ast.Module:
    try:
        return _tree(text, file.path)
    except SyntaxError as error:
        line = lines_of(text)[(error.lineno or 1) - 1]
        at = errors.Span(f"rewritten/{file.path.name}", error.lineno or 1, 1, len(line) or 1, line)
        if tab := re.search(r"^ *\t", file.text, re.M):
            number = file.text.count("\n", 0, tab.start()) + 1
            raise errors.Unsupported(
                f"{file.path.name} is indented with tabs, but inserted lines cannot be",
                at=errors.Span(file.display, number, 1, 1, file.line(number)),
                hint="indent the file with spaces",
            ) from None
        raise errors.BrokenOutput(
            f"the new source does not parse: {error.msg}",
            at=at,
            hint="this is a defect of slapo-rewrite, not of your input; nothing was written",
        ) from error


def _syntax_place(error: SyntaxError, path: Path) -> errors.Span:
    column = max(1, error.offset or 1)
    width = 1
    if error.end_lineno == error.lineno and error.end_offset and error.end_offset > column:
        width = error.end_offset - column
    text = (error.text or "").rstrip("\r\n")
    return errors.Span(str(path), error.lineno or 1, column, width, text)


def _holding(node: ast.AST, at: Position) -> list[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, PLACED) and not encloses(extent(child), at):
            continue
        inner = _holding(child, at)
        if inner:
            return [node, *inner]
    return [node] if isinstance(node, (*PLACED, ast.Module)) else []


def _is_companion(method: ast.FunctionDef) -> bool:
    """Whether a method accompanies another of its name: a setter, a deleter, an overload."""
    names = {d.attr if isinstance(d, ast.Attribute) else "" for d in method.decorator_list}
    names |= {d.id for d in method.decorator_list if isinstance(d, ast.Name)}
    return bool(names & {"setter", "deleter", "overload"})
