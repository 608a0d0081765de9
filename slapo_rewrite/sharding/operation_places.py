"""Finds the place of an operation in a file: its lines and columns.

It is read from the frames of a call, or from the traceback of an error.
"""

from __future__ import annotations

import ast
import inspect
import io
import linecache
import os
import sys
import textwrap
import traceback
import types
from collections.abc import Callable

import torch
from torch import nn

from slapo_rewrite.code.text import Place, positions

_PACKAGE = os.path.dirname(__file__)
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


def calling_frame() -> types.FrameType | None:
    """The frame that calls the operation: the innermost outside torch and this package."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if os.path.dirname(name) != _PACKAGE and not name.startswith(_TORCH):
            return frame
        frame = frame.f_back
    return None


def first_argument(frame: types.FrameType) -> object:
    """The first argument of a frame's function, `self` for a method."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return frame.f_locals.get(names[0]) if names else None


def place_of(frame: types.FrameType) -> Place | None:
    """The place of a frame's current instruction."""
    return place_at(frame.f_code, frame.f_lasti)


def place_at(code: types.CodeType, instruction: int) -> Place | None:
    """The place of an instruction."""
    line, _, _, end_column = at = positions(code)[instruction // 2]
    return Place(code.co_filename, at) if line and end_column else None


def text_at(place: Place, editable: Callable[[str], str | None]) -> str:
    """The text at a place; empty if its file cannot be read.

    For an editable file it comes from `editable`: rules may have changed the text already.
    """
    text = editable(place.filename)
    known = linecache.getlines(place.filename) if text is None else io.StringIO(text).readlines()
    line, column, end_line, end_column = place.at
    found = [each.encode() for each in known[line - 1 : end_line]]
    if found:
        found[-1] = found[-1][:end_column]
        found[0] = found[0][column:]
    return b"".join(found).decode(errors="ignore")


def expression_at(place: Place, editable: Callable[[str], str | None]) -> ast.expr | None:
    """The expression at a place; None if its text is not one expression."""
    try:
        return ast.parse(text_at(place, editable).strip(), mode="eval").body
    except SyntaxError:
        return None


def function_at(
    frame: types.FrameType, editable: Callable[[str], str | None]
) -> ast.FunctionDef | None:
    """The definition of the function that a frame runs; None if it is not found."""
    code = frame.f_code
    lines = [line for _, _, line in code.co_lines() if line is not None]
    place = Place(code.co_filename, (code.co_firstlineno, 0, max(lines), sys.maxsize))
    try:
        found = ast.parse(textwrap.dedent(text_at(place, editable))).body[0]
    except (SyntaxError, IndexError):
        return None
    return found if isinstance(found, ast.FunctionDef) and found.name == code.co_name else None


def place_in_traceback(error: BaseException, editable: Callable[[str], str | None]) -> Place | None:
    """The innermost place in an editable file of an error's traceback."""
    found, step = None, error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if editable(code.co_filename):
            found = place_at(code, step.tb_lasti)
        step = step.tb_next
    return found


def is_method(cls: type, code: types.CodeType) -> bool:
    """Whether code is that of a class's method or property, other than `nn.Module`'s own."""
    found = (vars(base).get(code.co_name) for base in cls.__mro__ if base is not nn.Module)
    found = (f.fget if isinstance(f, property) else f for f in found)
    codes = (inspect.unwrap(f).__code__ for f in found if inspect.isfunction(f))
    # A method's code may be replaced during a run by one at the same file and line.
    where = code.co_filename, code.co_firstlineno
    return any((each.co_filename, each.co_firstlineno) == where for each in codes)


def raised_by(error: BaseException) -> bool:
    """Whether an error comes from a `raise` or `assert` statement outside of torch."""
    steps = traceback.extract_tb(error.__traceback__)
    is_own = bool(steps) and not steps[-1].filename.startswith(_TORCH)
    return is_own and (steps[-1].line or "").strip().startswith(("raise", "assert"))
