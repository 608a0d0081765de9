"""The original model on one rank: how it is imported, built and run."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from slapo_rewrite.errors import first_line

from .figures import Named
from .isolated_imports import (
    ToolBlocker,
    import_original,
    import_output,
    load_beside,
    load_schedule,
)
from .probes import dropouts, in_float64, nudge, tie_groups, vary_constants

Stage = Callable[[str], None]
T = TypeVar("T")
SEED = 0


def from_all_ranks(value: T) -> list[T]:
    """The values of all ranks, in rank order; every rank has to call it."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def copied(model: nn.Module) -> dict[str, Tensor]:
    """A copy of a model's state dict, with the metadata of its modules' versions."""
    state = model.state_dict()
    state.update({name: tensor.clone() for name, tensor in state.items()})
    return state


@dataclass(frozen=True)
class Rewritten:
    """A class that the schedule changed or added."""

    original: Any  # the original's class; None if the schedule added the class
    now: Any  # the output's class
    lines: tuple[str, ...]  # the schedule's lines


class Original:
    """The original, and a copy in float64 as the reference for it and the rewritten model.

    Attributes:
        original: The model built from the original module.
        classes: The classes that the schedule changed or added.
        exact: The original in float64. If it does not run in float64, the original with weights
            changed by one rounding, which also shows the effect of rounding. None if neither is
            available.
        nudged: Whether `exact` is the one with changed weights.
        doubled: Whether everything runs in float64.
        drawn: The original's state dict as built from `SEED`.
        redrawn: The names of tensors that differ when it is built from `SEED` again.
        full: Like `drawn`, with a little noise in constant tensors.
        groups: The names of each tied parameter of the original.
        aliases: For each of these names, its group.
        notes: Remarks for the report.
        source: The original's file and hash.
        share: This rank's share of the original's parameters; None before they are built.
        put: Every module that was set in another one during building, with the other one's class.
    """

    def __init__(self, job: dict[str, Any], rank: int, stage: Stage) -> None:
        self.job, self.rank, self.world, self.stage = job, rank, int(job["world"]), stage
        self.notes: list[str] = []
        self.source: dict[str, str] | None = None
        self.share: float | None = None
        self.classes: list[Rewritten] = []
        self.put: list[tuple[type, nn.Module | None]] = []
        self.exact: nn.Module | None = None
        self.nudged = self.doubled = False

    def note(self, words: str) -> None:
        """Adds a note, once."""
        if words not in self.notes:
            self.notes.append(words)

    def import_all(self) -> None:
        """Imports schedule, original and output; after the schedule the tool is blocked."""
        job, stage = self.job, self.stage
        stage("loading the schedule")
        self.schedule = load_schedule(Path(job["schedule"]))
        self.twin: Any = load_beside(Path(job["twin"]))
        smaller = importlib.import_module(f"{self.twin.__package__}.small_arguments")
        self.blocker = ToolBlocker(job["tool"], Path(job["out"]))
        self.blocker.install()
        stage("importing the original")
        self.original_module = import_original(job["source"])
        if file := getattr(self.original_module, "__file__", None):
            digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
            self.source = {"file": file, "sha256": digest}
        with contextlib.suppress(Exception):  # an error in the schedule's `model` recurs later
            smaller.supply(self.schedule, self.original_module, self.twin.LARGE)
        if hasattr(self.schedule, self.twin.SMALL_BUILD):
            self.note(
                "the model is large, so a small one was compared, with smaller constructor "
                "arguments; verify_model(m) in the schedule can define another"
            )
        stage("importing the output")
        self.rewritten_module, self.loading = import_output(
            Path(job["out"]), job["stem"], job["support"]
        )
        package = self.rewritten_module.__name__.rpartition(".")[0]
        self.classes = [
            Rewritten(
                getattr(sys.modules.get(each["module"], self.original_module), each["name"], None),
                getattr(sys.modules.get(f"{package}.{each['stem']}"), each["name"], None),
                tuple(each["lines"]),
            )
            for each in job["rewritten"]
        ]

    def misfit(self, ranks: int) -> str | None:
        """The error of building the rewritten model as rank 0 of this many ranks, or None.

        The other ranks are faked in this one process. The text is that of the output's own error
        if a size does not fit; None if all fit, or if it cannot be found out in this way.
        """
        try:
            with _pretended(ranks), self.twin.on_meta():
                self.small(self.rewritten_module)
        except ValueError as error:
            out = Path(self.job["out"])
            frames = traceback.extract_tb(error.__traceback__)
            if any(Path(frame.filename).parent == out for frame in frames):
                return str(error)
        except Exception:
            return None  # not every model can be built on `meta`; the ranks report real errors
        return None

    def join_group(self) -> None:
        """Joins the process group if there are several processes."""
        if self.world == 1:
            return
        self.stage("joining the process group")
        # Longer than the job's time: the worker's own timer ends it first and shows where it hangs.
        left_s = max(1.0, float(self.job["deadline"]) - time.time()) + 60
        store = dist.FileStore(  # type: ignore[attr-defined]
            str(Path(self.job["folder"]) / "store"), self.world
        )
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self.rank,
            world_size=self.world,
            timeout=datetime.timedelta(seconds=left_s),
        )

    def build_original(self, *, exactly: bool = True) -> None:
        """Builds the original, and its copy in float64 if `exactly`."""
        self.stage("building the original")
        self.original = self.built(self.original_module, SEED)
        self.drawn = copied(self.original)
        self.redrawn: set[str] = set()
        vary_constants(self.original)
        self.full = copied(self.original)
        self.groups = tie_groups(self.original)
        self.aliases = {name: group for group in self.groups for name in group}
        if exactly:
            self.stage("building the original in float64")
            exact = self.built(self.original_module, SEED)
            again = exact.state_dict()
            self.redrawn = {n for n in again if not torch.equal(again[n], self.drawn[n])}
            exact.load_state_dict(self.full)
            self.exact = exact.double()

    def built(self, module: Any, seed: int) -> nn.Module:
        """Builds the small model from a module's classes."""
        torch.manual_seed(seed)
        watched = register_module_module_registration_hook(
            lambda holder, name, part: self.put.append((type(holder), part))
        )
        try:
            with self.twin.drawing_beside_torch(seed):
                model = self.small(module).float().train()
        finally:
            watched.remove()
        return model.double() if self.doubled else model

    def small(self, module: Any) -> nn.Module:
        """The schedule's own small model, or one that the tool makes."""
        model: nn.Module = self.twin.build_small(self.schedule, module, self.job["depth"])
        return model

    def given(self, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        """A copy of a step's inputs, in the dtype of `model`, which may change it."""

        def fresh(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: fresh(part) for key, part in value.items()}
            if type(value) in (list, tuple):
                return type(value)(fresh(part) for part in value)
            if not isinstance(value, Tensor):
                return value
            value = value.detach().clone()
            return value.double() if self.is_double(model) and value.is_floating_point() else value

        return {name: fresh(value) for name, value in inputs.items()}

    def outputs(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A model's result for a step's inputs, and the copies of these that it got."""
        given = self.given(model, inputs)
        return model(**self.twin.model_inputs(self.schedule, model, given)), given

    def hold(self, model: nn.Module) -> None:
        """Records this rank's share of the parameters, given its model."""
        sizes = [sum(p.numel() for p in m.parameters()) for m in (model, self.original)]
        self.share = sizes[0] / max(1, sizes[1])

    def whole(self, model: nn.Module, named: Named) -> Named:
        """Full tensors of tensors sharded like a model's parameters; all its ranks call it."""
        return named if self.loading is None else dict(self.loading.to_full(model, named))

    def is_double(self, model: nn.Module) -> bool:
        """Whether a model runs in float64."""
        return self.doubled or (model is self.exact and not self.nudged)

    def exactly(self, action: Callable[[nn.Module], Any]) -> Any:
        """The result of `action` for `exact`, replacing that if it does not run; or None."""
        if self.exact is None:
            return None
        try:
            with in_float64(self.is_double(self.exact)):
                return action(self.exact)
        except Exception as error:
            if self.nudged:
                self.exact = None
                return None
            self.note(
                f"the original does not run in float64 ({first_line(error)}): its rounding error "
                "is taken from a copy whose weights are off by one rounding"
            )
            self.nudged, self.exact = True, self.built(self.original_module, 0)
            self.exact.load_state_dict(self.full)
            nudge(self.exact)
            for holder, name, _ in list(dropouts(self.exact, configs=True)):
                setattr(holder, name, 0.0)
            return self.exactly(action)


@contextlib.contextmanager
def _pretended(ranks: int) -> Iterator[None]:
    """A fake process group of this many ranks, in which this process is rank 0."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
