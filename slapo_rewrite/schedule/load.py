"""Finds and loads a schedule file, and sets its knobs."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import sysconfig
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.bundle import rules_folder
from slapo_rewrite.code.file import lines_of
from slapo_rewrite.code.locate import near_files
from slapo_rewrite.code.syntax import extent
from slapo_rewrite.code.text import positions
from slapo_rewrite.errors import Span

# The module name of the schedule file.
MODULE = "schedule_file"

# The folders of the tool's own code, and of libraries.
_TOOL = (Path(__file__).resolve().parents[1], rules_folder() / "fusions")
_LIBRARIES = tuple(Path(sysconfig.get_path(n)) for n in ("stdlib", "purelib", "platlib"))


def bundled() -> dict[str, Path]:
    """The schedules that ship with the tool, by name."""
    folder = rules_folder() / "schedules"
    return {p.stem: p for p in sorted(folder.glob("*.py")) if p.stem != "__init__"}


def locate(name: str) -> Path:
    """The file of a schedule, given by its path or by the name of a bundled one."""
    path = Path(name)
    if path.suffix == ".py" or "/" in name:
        if not path.is_file():
            raise errors.ScheduleError(f"there is no schedule file `{name}`", hint=near_files(path))
        return path
    known = bundled()
    if name in known:
        return known[name]
    if name == "auto" or name.startswith("auto:"):
        raise errors.ScheduleError(
            "`auto` is not available here: only a rewrite, or --diff, derives a schedule",
            hint="write it to a file first, and use that file: slapo-rewrite SOURCE --schedule "
            "auto --write-schedule s.py --diff",
        )
    raise errors.ScheduleError(
        f"there is no schedule `{name}`",
        hint=errors.did_you_mean(name, known)
        or f"give a file (`{name}.py`) or one of " + ", ".join(known),
    )


@dataclass(frozen=True)
class Knob:
    """A keyword parameter of `schedule` that `--set` may change."""

    name: str
    annotation: Any
    default: Any


class ScheduleFile:
    """A schedule file: its text, and the functions that it defines.

    `name` is as the user gave it, and `module` is its namespace.
    """

    def __init__(self, name: str, path: Path, text: str, module: types.ModuleType) -> None:
        self.name, self.path, self.text, self.module = name, path, text, module
        self.lines = lines_of(text)
        self.tree = ast.parse(text)
        calls = sorted(
            (n.lineno, n.end_lineno or n.lineno)
            for n in ast.walk(self.tree)
            if isinstance(n, ast.Expr)
        )
        # For each line the innermost statement, which begins last.
        self._calls = {n: (a, b) for a, b in calls for n in range(a, b + 1)}

    def edited(self, text: str) -> ScheduleFile:
        """A copy with another text, whose definitions are copied to outputs."""
        return ScheduleFile(self.name, self.path, text, self.module)

    @classmethod
    def load(cls, name: str) -> ScheduleFile:
        """Reads and runs the file."""
        path = locate(name)
        try:
            text = path.read_text(encoding="utf-8-sig")
            code = compile(text, str(path), "exec", dont_inherit=True)
        except SyntaxError as error:
            raise errors.ScheduleError(
                f"the schedule does not parse: {error.msg}", at=syntax_span(error, str(path))
            ) from None
        except (OSError, ValueError) as error:
            raise errors.ScheduleError(f"cannot read `{path}`: {error}") from None
        module = types.ModuleType(MODULE)
        module.__file__ = str(path)
        sys.modules[module.__name__] = module
        schedule = cls(name, path, text, module)
        # A schedule may import files beside it.
        sys.path.insert(0, str(path.resolve().parent))
        try:
            schedule.guarded(lambda: exec(code, module.__dict__), "the schedule file")
        finally:
            sys.path.pop(0)
        for wanted in ("model", "schedule"):
            if not callable(getattr(module, wanted, None)):
                raise errors.ScheduleError(
                    f"`{path}` defines no function `{wanted}`",
                    hint=f"write `def {wanted}({'m' if wanted == 'model' else 's'}): ...` in it",
                )
        check_functions(vars(module), path, schedule.definition)
        return schedule

    def guarded(self, action: Callable[[], Any], what: str) -> Any:
        """Runs the user's code; its exceptions become a `ScheduleError` at the user's line.

        Exceptions raised by the tool, called from that code, are defects of the tool and stay as
        they are.
        """
        try:
            with contextlib.chdir("."):  # restores the working directory if the code changes it
                return action()
        except (errors.RewriteError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a schedule that calls sys.exit() as well
            assert error.__traceback__ is not None
            if self._is_ours(error.__traceback__.tb_next):
                raise
            at = self.span_of(error.__traceback__)
            raise errors.ScheduleError(
                f"{what} raises {type(error).__name__}: {error}", at=at
            ) from error

    def _is_ours(self, error: types.TracebackType | None) -> bool:
        """Whether the innermost frame outside of libraries is the tool's, not the user's."""
        ours = False
        for frame, _ in traceback.walk_tb(error):
            path = frame.f_code.co_filename
            if path == str(self.path):
                ours = False
            elif any(Path(path).is_relative_to(folder) for folder in _TOOL):
                ours = True
            elif not any(Path(path).is_relative_to(folder) for folder in _LIBRARIES):
                ours = False
        return ours

    def blamed(self, error: BaseException) -> errors.ScheduleError | None:
        """The `ScheduleError` for an exception in the file's own `inputs` or `loss`; else None."""
        # Imported here, where torch is loaded already: it takes long to import.
        from slapo_rewrite.model.small_model import NotGivenError

        if isinstance(error, NotGivenError):
            return errors.ScheduleError(str(error), at=self.definition(error.function))
        frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        for name in ("inputs", "loss"):
            if getattr(getattr(self.module, name, None), "__code__", None) in frames:
                return errors.ScheduleError(
                    f"`{name}` raises {type(error).__name__}: {error}",
                    at=self.span_of(error.__traceback__),
                )
        return None

    def span_of(self, error: types.TracebackType | None) -> Span | None:
        """The innermost place of a traceback in this file."""
        found = None
        while error is not None:
            if error.tb_frame.f_code.co_filename == str(self.path):
                found = (error.tb_frame.f_code, error.tb_lasti)
            error = error.tb_next
        return self.span_at(*found) if found else None

    def shadowed(self) -> list[str]:
        """Warnings about functions `schedule` that a later one replaces."""
        found = [n for n in self.tree.body if isinstance(n, ast.FunctionDef)]
        lines = [n.lineno for n in found if n.name == "schedule"]
        return [
            f"line {n}: this `schedule` is not run: line {lines[-1]} defines another one"
            for n in lines[:-1]
        ]

    def span_at(self, code: types.CodeType, instruction: int) -> Span:
        """The place of one bytecode instruction of this file."""
        first, _, _, end_column = at = positions(code)[max(instruction, 0) // 2]
        line = first or code.co_firstlineno
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        if first and end_column:
            return Span.of_bytes(str(self.path), at, text)
        return Span.of_line(str(self.path), line, text)

    def statement(self, line: int) -> str:
        """The expression statement that contains a line, on one line."""
        first, last = self._calls.get(line, (line, line))
        return " ".join(" ".join(self.lines[first - 1 : last]).split())

    def caller(self) -> Span | None:
        """The place in this file that is calling the tool."""
        frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
        own = (f for f in frames if f.f_code.co_filename == str(self.path))
        return next((self.span_at(f.f_code, f.f_lasti) for f in own), None)

    @property
    def knobs(self) -> dict[str, Knob]:
        """The keyword parameters of `schedule`, by name."""
        function = self.module.schedule
        try:
            hints = typing.get_type_hints(function)
        except Exception:
            hints = {}
        found = {}
        for parameter in list(inspect.signature(function).parameters.values())[1:]:
            if parameter.default is inspect.Parameter.empty:
                raise errors.ScheduleError(
                    f"knob `{parameter.name}` of `schedule` has no default",
                    at=self.definition("schedule"),
                    hint=f"write `{parameter.name}: TYPE = VALUE`",
                )
            annotation = hints.get(parameter.name, type(parameter.default))
            default = parameter.default
            if annotation is float and type(default) is int:
                default = float(default)  # a slice to 1 would be one element, to 1.0 all of them
            found[parameter.name] = Knob(parameter.name, annotation, default)
        return found

    def _parameter(self, name: str) -> Span | None:
        """The place of a parameter of `schedule`, with its annotation."""
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == "schedule":
                for each in (*node.args.args, *node.args.kwonlyargs):
                    if each.arg == name:
                        line = self.lines[each.lineno - 1]
                        return Span.of_bytes(str(self.path), extent(each), line)
        return self.definition("schedule")

    def definition(self, name: str) -> Span | None:
        """The place of a function's header in the file."""
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return Span.of_line(str(self.path), node.lineno, self.lines[node.lineno - 1])
        return None

    def settings(self, given: Sequence[str]) -> dict[str, Any]:
        """The values of all knobs: the defaults, overridden by the `K=V` of `--set`."""
        knobs = self.knobs
        values = {name: knob.default for name, knob in knobs.items()}
        for item in given:
            name, equals, text = item.partition("=")
            if not equals:
                raise errors.BadKnob(
                    f"`--set {item}` has no value", hint="write `--set NAME=VALUE`"
                )
            if name not in knobs:
                raise errors.UnknownKnob(
                    f"the schedule has no knob `{name}`",
                    at=self.definition("schedule"),
                    hint=errors.did_you_mean(name, knobs)
                    or ("its knobs are " + ", ".join(knobs) if knobs else "it has no knobs"),
                )
            values[name] = self._convert(knobs[name], text)
        return values

    def _convert(self, knob: Knob, text: str) -> Any:
        try:
            return convert(knob.annotation, text)
        except ValueError as error:
            raise errors.BadKnob(
                f"`{text}` is not a value for knob `{knob.name}`: {error}",
                at=self._parameter(knob.name),
            ) from None


# The functions that a schedule may define, with their argument.
_GIVEN = {
    "model": "module", "inputs": "model", "verify_model": "module",
    "schedule": "selection", "loss": "outputs", "space": "knobs",
}  # fmt: skip


def check_functions(
    defined: Mapping[str, Any], path: object, definition: Callable[[str], Span | None]
) -> None:
    """Checks that the names of functions which a schedule may define are such functions.

    Raises:
        ScheduleError: One is something else: `from transformers import *` binds a module `loss`.
    """
    for name, given in _GIVEN.items():
        if name not in defined:
            continue
        function = defined[name]
        if not callable(function):
            kind = type(function).__name__
            raise errors.ScheduleError(
                f"`{name}` in `{path}` is not a function, but of type {kind}",
                hint=f"the name `{name}` is reserved in a schedule: define it as a function, or "
                "rename the present one (`import *` may have brought it in)",
            )
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise errors.ScheduleError(
                f"`{name}` is a generator or a coroutine: calling it runs nothing",
                at=definition(name),
                hint="write a plain function, without `yield` and `async`",
            )
        has_more = name in ("schedule", "loss", "space")  # knobs, and inputs that are targets
        with contextlib.suppress(ValueError):  # it has no signature
            signature = inspect.signature(function)
            try:
                (signature.bind_partial if has_more else signature.bind)(None)
            except TypeError as error:
                raise errors.ScheduleError(
                    f"`{name}` is called with one argument, the {given}: {error}",
                    at=definition(name),
                ) from None


BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def convert(annotation: Any, text: str) -> Any:
    """Converts `text` to the annotated type; raises a `ValueError` with the reason."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        for choice in arguments:
            if str(choice) == text:
                return choice
        raise ValueError("it must be one of " + ", ".join(str(c) for c in arguments))
    if origin in (typing.Union, types.UnionType):
        if type(None) in arguments and text.lower() == "none":
            return None
        for choice in arguments:
            if choice is not type(None):
                try:
                    return convert(choice, text)
                except ValueError:
                    continue
        raise ValueError(f"it must be {annotation}")
    if origin in (list, tuple):
        inner = arguments[0] if arguments else str
        return origin(convert(inner, part.strip()) for part in text.split(",") if part.strip())
    if annotation is bool:
        if text.lower() not in BOOLEANS:
            raise ValueError("it must be true or false")
        return BOOLEANS[text.lower()]
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError:
            kind = "a whole number" if annotation is int else "a number"
            raise ValueError(f"it must be {kind}") from None
    if annotation is str:
        return text
    if annotation is types.NoneType:
        raise ValueError("its default has no type: annotate it, for example as `int | None`")
    kind = getattr(annotation, "__name__", annotation)
    raise ValueError(f"knobs of type {kind} cannot be set from the command line")


def syntax_span(error: SyntaxError, path: str) -> Span:
    """The place of CPython's syntax error."""
    text = (error.text or "").rstrip("\n")
    width = (error.end_offset or 0) - (error.offset or 0)
    return Span(path, error.lineno or 1, max(1, error.offset or 1), max(1, width), text)
