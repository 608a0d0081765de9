"""Measures the memory that a run of a model holds, and how much of it dead variables keep alive.

The live model runs on the meta device: with gradients in training mode, and without in eval mode.
Allocating and freeing a storage are events, as is each call of a function of the file. A second run
deletes every variable where it is dead. It allocates the same storages in the same order, and frees
some of them earlier. The two runs tell what each variable keeps alive, and the peak of a call if
only some variables were deleted.
"""

from __future__ import annotations

import ast
import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from slapo_rewrite.code.dead_values import Death
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.errors import first_line
from slapo_rewrite.model.costs import OnMeta
from slapo_rewrite.model.results import tensors
from slapo_rewrite.model.storages import Storages
from slapo_rewrite.model.tree import Tree
from slapo_rewrite.model.watched_functions import Live, watching


class CannotMeasure(Exception):
    """The model does not run without values; holds the reason."""


@dataclass(eq=False)
class Frame:
    """One call of a function."""

    function: ast.FunctionDef
    first: int  # the number of storages allocated before it began
    last: int = 0  # the number of storages allocated before it ended
    end: int = 0  # the event at which it ended


@dataclass
class Record:
    """The record of one run."""

    # The bytes of each storage, in order of allocation.
    sizes: list[int] = field(default_factory=list)
    # By storage number: how many storages had been allocated when it was freed, and at which event.
    # Storages that were never freed are missing.
    let_go: dict[int, tuple[int, int]] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)  # the calls of watched functions
    # By storage number: the variables that kept it alive until they were deleted, each with its
    # call.
    keepers: dict[int, list[tuple[Death, Frame]]] = field(default_factory=dict)

    def end_of(self, storage: int) -> int:
        """The number of storages that were allocated before one was freed."""
        return self.let_go.get(storage, (len(self.sizes), 0))[0]

    def steps(self) -> list[int]:
        """The change of held bytes at each allocation, and at the end."""
        found = [0] * (len(self.sizes) + 1)
        for number, size in enumerate(self.sizes):
            found[number] += size
            found[self.end_of(number)] -= size
        return found

    def held(self) -> list[int]:
        """The held bytes at each allocation."""
        return list(itertools.accumulate(self.steps()[:-1]))


class _Recorder(TorchDispatchMode):
    """Records storages and calls.

    `functions` are watched; `deaths` are the variables that they delete. Both are numbered. The
    `outside` tensors live all the time.
    """

    def __init__(
        self,
        functions: Sequence[ast.FunctionDef],
        deaths: Sequence[Death],
        outside: Sequence[Tensor],
    ) -> None:
        super().__init__()
        self.record = Record()
        self._functions, self._deaths = functions, deaths
        self._storages = Storages(outside, self._let_go)
        self._dropped: tuple[Death, Frame] | None = None
        self._events = 0
        self._is_over = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in tensors(results):
            if self._storages.made(tensor) is not None:
                self._events += 1
                self.record.sizes.append(tensor.untyped_storage().nbytes())
        return results

    def _let_go(self, number: int) -> None:
        if self._is_over:
            return
        self._events += 1
        self.record.let_go[number] = len(self.record.sizes), self._events
        if self._dropped is not None:
            keepers = self.record.keepers.setdefault(number, [])
            if self._dropped not in keepers:
                keepers.append(self._dropped)

    # Called by watched functions ------------------------------------------------------------------

    def enter(self, number: int) -> Any:
        """Records the begin of a call, which ends when the returned token is freed."""
        frame = Frame(self._functions[number], len(self.record.sizes))
        self.record.frames.append(frame)
        token = _Token(frame)
        weakref.finalize(token, self._leave, frame)
        return token

    def _leave(self, frame: Frame) -> None:
        self._events += 1
        frame.last, frame.end = len(self.record.sizes), self._events

    def drop(self, number: int, call: Any, value: Any) -> None:
        """Records that a variable of a call is about to be deleted."""
        self._dropped = self._deaths[number], call.frame
        for tensor in tensors(value):
            if (kept := self._storages.number_of(tensor)) is not None:
                self.record.keepers.setdefault(kept, []).append(self._dropped)

    def dropped(self) -> None:
        """Records that the variable was deleted."""
        self._dropped = None

    def over(self) -> Record:
        """Ends the recording and returns it."""
        self._is_over = True
        return self.record


class _Token:
    """A local object of a running call, freed when the call ends."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame


def recorded(
    tree: Tree,
    inputs: Mapping[str, Any],
    file: SourceFile,
    lives: Sequence[Live],
    deaths: Sequence[Death],
    *,
    training: bool,
) -> Record:
    """Records a forward pass that deletes some variables; raises `CannotMeasure` if it fails."""
    model = tree.root.live
    was_training = model.training
    given = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), dict(inputs))
    outside = [*model.parameters(), *model.buffers(), *tensors(given)]
    recorder = _Recorder([each.function for each in lives], deaths, outside)
    model.train(training)
    try:
        with (
            watching(file, lives, deaths, recorder),
            torch.set_grad_enabled(training),
            OnMeta(),
            recorder,
        ):
            outputs = model(**given)
            record = recorder.over()
            del outputs
    except Exception as error:  # the model's own code
        raise CannotMeasure(first_line(error)) from error
    finally:
        model.train(was_training)
    return record
