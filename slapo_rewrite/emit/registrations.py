"""Removes decorators of registries that accept each name once, and hold the original's.

The output imports the registry from where the original does, and usually imports the original that
way: `@register_model()` of torchvision then raises. Such a decorator is left out of the output, if
it returns its argument.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slapo_rewrite.code.decorators import callee, decorated_alike
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.runs import without_decorator
from slapo_rewrite.code.text import listed
from slapo_rewrite.emit.draft import Draft
from slapo_rewrite.emit.rewritten_text import rewritten
from slapo_rewrite.emit.sibling_files import SiblingFiles
from slapo_rewrite.model.emitted import Emitted, FailedOutput, imported


@contextlib.contextmanager
def imported_beside(draft: Draft, copies: SiblingFiles, anew: Sequence[str]) -> Iterator[Emitted]:
    """Imports an output, without decorators that fail since the original is imported as well.

    They are removed from the draft's texts. The `anew` modules are imported again if a file fails.
    """
    with contextlib.ExitStack() as stack:
        refused: FailedOutput | None = None
        bare: list[tuple[SourceFile, str]] = []  # the definitions without such decorators
        while True:
            try:
                emitted = stack.enter_context(imported(draft.files, draft.model_file, anew))
                break
            except FailedOutput as failed:
                refused = failed
                if not (found := _left_out(draft, copies, *failed.frames[-1])):
                    with draft.who_wrote().told():
                        raise
                bare += found
        with draft.who_wrote().told():
            for file, name in bare:
                after = emitted.helper(Path(copies.name(file)).stem) or emitted.module
                both = (vars(module).get(name) for module in (sys.modules[file.name], after))
                if not _are_alike(*both) and refused is not None:
                    raise refused
            yield emitted


def _left_out(
    draft: Draft, copies: SiblingFiles, name: str, line: int
) -> list[tuple[SourceFile, str]]:
    """Removes the decorator at a line of a file from all definitions, and returns these."""
    source = next((f for f in copies.files.values() if copies.name(f) == name), None)
    if source is None:
        return []
    file = source.edited(draft.texts[name])
    if found := decorated_alike(file.tree, line):
        why = f"`{callee(found[0][1])}` refuses a name that the original has registered"
        edits = [without_decorator(file, d).caused_by((), why) for _, d in found]
        changed = rewritten(file, edits, edits, draft.changes[name])
        draft.texts[name], draft.changes[name] = changed
        names = listed([each.name for each, _ in found])
        draft.warnings.append(f"{why}, and is left out: {name} does not register {names}")
    return [(source, each.name) for each, _ in found]


def _are_alike(before: Any, after: Any) -> bool:
    """Whether a definition is equal apart from its module and a schedule's new methods."""
    if type(before) is not type(after):
        return False
    if isinstance(before, type):
        kinds = ([c.__qualname__ for c in cls.__mro__] for cls in (before, after))
        return len({*map(tuple, kinds)}) == 1 and vars(before).keys() <= vars(after).keys()
    same = _spelled(before) == _spelled(after) and vars(before).keys() == vars(after).keys()
    inner = [vars(each).get("__wrapped__") for each in (before, after)]
    return same and (inner == [None, None] or _are_alike(*inner))


def _spelled(function: Any) -> tuple[str, ...]:
    code = getattr(function, "__code__", None)
    return () if code is None else (code.co_qualname, *code.co_varnames)
