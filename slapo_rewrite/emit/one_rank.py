"""Counts a rewritten model on one of several ranks, while its schedule still runs."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.errors import first_line
from slapo_rewrite.model.emitted import Emitted
from slapo_rewrite.model.meta_device import pretend_world, without_dynamo
from slapo_rewrite.model.short_build import Shortening
from slapo_rewrite.model.tree import Tree, build_model
from slapo_rewrite.primitives.base import Count, DoesNotFit
from slapo_rewrite.project import Project


def forked(work: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Runs work in a forked process, which starts at once, and yields its results one by one.

    The results end when the work ends or fails.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def send() -> None:
        import torch

        torch.set_num_threads(1)  # a fork does not have the parent's threads
        with suppress(BaseException), closing(sender):
            for each in work():
                sender.send(each)

    def received() -> Iterator[Any]:
        with suppress(EOFError):
            while True:
                yield receiver.recv()
        process.join()

    process = context.Process(target=send)
    process.start()
    sender.close()
    return received()


class OneRank:
    """Counts a rewritten model as one of several ranks builds it.

    A forked process rewrites it: there the schedule runs from the beginning to its end, and ignores
    memory budgets for several ranks. `try_out` applies a schedule to a project, and runs a trial on
    the output.
    """

    def __init__(
        self, source: str, schedule: str, settings: Sequence[str], try_out: Callable[..., None]
    ) -> None:
        self.source, self.schedule, self.settings = source, schedule, settings
        self.try_out = try_out

    def __call__(self, ranks: int, count: Count) -> Any:
        """Calls `count` with the output's tree and modules; raises `DoesNotFit` if that fails."""
        if sys.platform != "linux":
            raise DoesNotFit("a budget with `ranks=` works only on Linux")
        told = [*forked(lambda: [self._told(ranks, count)])]
        found, why = told[0] if told else (None, "the process that counts memory ended")
        if why is not None:
            raise DoesNotFit(why)
        return found

    def _told(self, ranks: int, count: Count) -> tuple[Any, str | None]:
        """The count, or the reason why it failed."""
        try:
            return self._counted(ranks, count), None
        except errors.RewriteError as error:
            return None, error.message
        except Exception as error:  # the model's own code
            return None, first_line(error)

    def _counted(self, ranks: int, count: Count) -> Any:
        found: list[Any] = []

        def trial(emitted: Emitted, _: Shortening) -> None:
            with pretend_world(ranks), without_dynamo():
                make = project.schedule.module.model
                tree = Tree(build_model(make, emitted.module))
                found.append(count(tree, emitted.modules()))

        project = Project(self.source, self.schedule)
        self.try_out(project, self.settings, trial, on_ranks=False)
        return found[0]
