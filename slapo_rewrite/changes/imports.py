"""Names that a rewritten file uses from other modules, and their import lines."""

from __future__ import annotations

import ast
import re
import textwrap
import types
from dataclasses import dataclass, fields, replace

from slapo_rewrite import errors, runtime
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.import_lines import below
from slapo_rewrite.code.layout import fitted
from slapo_rewrite.code.names import unique
from slapo_rewrite.code.splice import Edit
from slapo_rewrite.code.text import imported_as
from slapo_rewrite.directive import Causes, Directive, merged_causes
from slapo_rewrite.model.layers import Layer

CHECKPOINT = "torch.utils.checkpoint"
# The module name of a schedule file, and the output's module for what it defines.
SCHEDULE, MODULES = "schedule_file", "modules"
# The backends of the functions that rules call, if the output defines these.
TRITON, INDUCTOR, EAGER = "triton", "inductor", "eager"
WRITTEN = (TRITON, INDUCTOR, EAGER)
# The modules of these functions; functions of one name and several backends have a module for each.
KERNELS = "kernels"
KERNEL_FILES = (KERNELS, *(f"{KERNELS}_{backend}" for backend in WRITTEN))


@dataclass(frozen=True)
class Function:
    """A function or class of the schedule file, or an importable one."""

    name: str  # its name in the output
    module: str | None  # the module to import it from; None if the schedule file defines it


@dataclass(frozen=True)
class Reference:
    """A name that a text uses from another module."""

    origin: str  # the dotted name by which the tool itself can import it
    module: str  # a helper module of the output, with a leading dot, or an installed one
    name: str  # the name in that module
    written: str  # how the text refers to it: usually by the name
    # For a function that rules call: its backend, unless that is a kernel.
    backend: str = ""


class Imports:
    """Collects references; a name that is taken in the file is written with its module."""

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        # Names used from each helper module of the output folder.
        self.helpers: dict[str, set[str]] = {}
        self.packages: dict[str, set[str]] = {}  # names used from each installed module
        self.references: dict[str, Reference] = {}  # all references, by their text
        self._modules: set[str] = set()
        self._along: set[str] = set()
        self._causes: dict[str, list[Directive]] = {}
        self._locals: set[str] | None = None
        self._defined: dict[str, tuple[str, Causes]] = {}

    def helper(
        self,
        module: str,
        name: str,
        causes: Causes,
        *,
        apart: bool = False,
        origin: str = "",
        backend: str = "",
    ) -> str:
        """The reference to a name of a helper module beside the model file.

        It includes the module if the name is taken, or if `apart` asks for that.
        """
        written = f"{module}.{name}" if apart or self._taken(name) else name
        if written != name and self._taken(module):
            raise errors.NameTaken(
                f"both `{name}` and `{module}` mean something else in {self.file.path.name}",
                at=causes[0].at if causes else None,
                hint="rename one of them in the source",
            )
        home = SCHEDULE if module == MODULES else f"{runtime.__name__}.{module}"
        found = Reference(origin or f"{home}.{name}", f".{module}", name, written, backend)
        return self.refer(found, causes)

    def keywords(self, layer: Layer, causes: Causes) -> list[tuple[str, str]]:
        """The text of a layer's keyword arguments."""
        return [(name, self.value(value, causes)) for name, value in layer.keywords]

    def value(self, value: object, causes: Causes) -> str:
        """The text of an argument.

        The value is a literal, an expression, or from a runtime module: a function or an object of
        a dataclass.
        """
        defined = value if isinstance(value, types.FunctionType) else type(value)
        package, _, module = defined.__module__.rpartition(".")
        if package != runtime.__name__:
            return repr(value)
        name = self.helper(module, defined.__name__, causes)
        if defined is value:
            return name
        given = [
            (f"{each.name}=" if each.kw_only else "") + repr(getattr(value, each.name))
            for each in fields(value)  # type: ignore[arg-type]
        ]
        return f"{name}({', '.join(given)})"

    def outside(self, module: str, name: str, causes: Causes, origin: str = "") -> str:
        """The reference to a name of an installed package, under an alias if it is taken."""
        if (known := self._known(f"{module}.{name}")) is not None:
            return known
        used = f"{module.partition('.')[0]}_{name}" if self._taken(name) else name
        if self._taken(used):
            raise errors.NameTaken(
                f"both `{name}` and `{used}` mean something else in {self.file.path.name}, and "
                f"`{name}` is needed from `{module}`",
                at=causes[0].at if causes else None,
                hint="rename one of them in the source",
            )
        found = Reference(origin or f"{module}.{name}", module, imported_as(name, used), used)
        return self.refer(found, causes)

    def functional(self, name: str, causes: Causes) -> str:
        """The reference to a function of `torch.nn.functional`."""
        known = self.spelled(f"torch.nn.functional.{name}")
        return known or self.outside("torch.nn.functional", name, causes)

    def function(self, function: Function, causes: Causes) -> str:
        """The reference to a class or function that the schedule names."""
        if function.module is None:
            return self.helper(MODULES, function.name, causes)
        if function.module == self.file.name:
            return function.name
        # Torch's modules are imported from the public package.
        module = "torch.nn" if function.module.startswith("torch.nn.modules.") else function.module
        if (known := self._known(module)) is not None:
            return f"{known}.{function.name}"
        return self.outside(module, function.name, causes)

    def _known(self, meaning: str) -> str | None:
        """The file's own name for something that it imports; None if it does not import it."""
        return next((name for name, m in self.file.imports.items() if m == meaning), None)

    def spelled(self, dotted: str) -> str | None:
        """A dotted name written with the longest prefix that the file imports; None without one."""
        known = [
            (len(meaning), name + dotted[len(meaning) :])
            for name, meaning in self.file.imports.items()
            if f"{dotted}.".startswith(f"{meaning}.")
        ]
        return max(known)[1] if known else None

    def refer(self, reference: Reference, causes: Causes) -> str:
        """Adds a reference to import, and returns its text."""
        self.references[reference.written] = reference
        self._causes.setdefault(reference.module, []).extend(causes)
        if not reference.module.startswith("."):
            self.packages.setdefault(reference.module, set()).add(reference.name)
            return reference.written
        module = reference.module[1:]
        self.helpers.setdefault(module, set()).add(reference.written)
        if "." in reference.written:
            self._modules.add(module)
        return reference.written

    def operators(self, causes: Causes) -> str:
        """The reference to `torch.ops`."""
        return self.spelled("torch.ops") or self.outside("torch", "ops", causes)

    def define(self, name: str, body: str, causes: Causes) -> str:
        """Adds a function without arguments to the model file; returns its name, made unique."""

        def is_taken(other: str) -> bool:
            return self._taken(other) or self._defined.get(other, (body,))[0] != body

        name = unique(name, is_taken, "_")
        known = self._defined.get(name, (body, ()))[1]
        self._defined[name] = (body, merged_causes(known, causes))
        return name

    def _taken(self, name: str) -> bool:
        """Whether the file uses a name, at its top level or inside a function."""
        if name in self.file.names:
            return True
        # A substring search first, which is a hundred times faster than one for a word.
        if name not in self.file.text or not re.search(rf"\b{name}\b", self.file.text):
            return False
        if self._locals is None:
            self._locals = {
                n.arg if isinstance(n, ast.arg) else n.id
                for n in ast.walk(self.file.tree)
                if isinstance(n, ast.arg)
                or (isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            }
        return name in self._locals

    def beside(self, module: str, name: str) -> None:
        """Imports what comes from a module from its copy in the output, of that name."""
        if module in self.packages:
            self.helpers.setdefault(name, set()).update(self.packages.pop(module))

    def taken_along(self, module: str) -> list[str]:
        """The names of a helper module that an existing import line must add; returned once."""
        name = module.removeprefix(".")
        if name in self._along or name not in self.helpers:
            return []
        self._along.add(name)
        return sorted(n for n in self.helpers[name] if "." not in n)

    def causes(self) -> dict[str, Causes]:
        """The directives that need each helper module."""
        return {
            m.lstrip("."): merged_causes(c) for m, c in self._causes.items() if m.startswith(".")
        }

    def edits(self, inlined: str | None = None) -> list[Edit]:
        """The import lines: those of a package after its other imports, helpers last.

        `inlined` replaces the helpers' import lines, if the helpers' definitions become part of the
        file.
        """
        edits, line_length = [], self.file.line_length
        statements = [n for n in self.file.tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
        for module, names in sorted(self.packages.items()):
            text = fitted(f"from {module} import {', '.join(sorted(names))}", 0, line_length)
            edits.append(self._after(_neighbour(statements, module), text, module))
        lines = []
        for module in sorted(self.helpers):
            shown = sorted(n for n in self.helpers[module] if "." not in n)
            if module in self._modules:
                lines.append(f"from . import {module}")
            if shown and module not in self._along:
                lines.append(fitted(f"from .{module} import {', '.join(shown)}", 0, line_length))
        if inlined is not None:
            lines = [inlined]
        if lines:
            needed = [f".{m}" for m in sorted(self.helpers)]
            edits.append(
                self._after(
                    statements[-1] if statements else None, "\n" + "\n".join(lines), *needed
                )
            )
        for name, (body, causes) in sorted(self._defined.items()):
            text = f"def {name}():\n{textwrap.indent(body, '    ')}"
            text = "\n\n" + fitted(text, 0, line_length)
            edit = self._after(statements[-1] if statements else None, text)
            edits.append(replace(edit, causes=causes, why=f"`{name}` is used below"))
        return edits

    def _after(self, statement: ast.stmt | None, text: str, *modules: str) -> Edit:
        causes = merged_causes(*(self._causes.get(m, []) for m in modules))
        edit = below(self.file, statement, "\n" + text)
        return edit.caused_by(causes, "import what is used below")


def _neighbour(statements: list[ast.Import | ast.ImportFrom], module: str) -> ast.stmt | None:
    """The import to put one from `module` after: the last of its package, or of the file."""
    package = module.split(".")[0]
    best: ast.stmt | None = None
    for statement in statements:
        if isinstance(statement, ast.ImportFrom) and not statement.level:
            names = [statement.module or ""]
        elif isinstance(statement, ast.Import):
            names = [a.name for a in statement.names]
        else:
            continue
        if any(n.split(".")[0] == package for n in names):
            best = statement
    return best or (statements[-1] if statements else None)
