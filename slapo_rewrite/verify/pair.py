"""Original and rewritten model side by side on one rank."""

from __future__ import annotations

import datetime
import hashlib
import time
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .figures import Named, tensors_in
from .imports import ToolBlocker, import_original, import_output, load_file, load_schedule
from .probes import dropouts, is_dropout, tie_groups, vary_constants

Stage = Callable[[str], None]


class Pair:
    """The two models, and the original in float64 as the reference for both.

    Attributes:
        original: Built from the original module.
        rewritten: Built from the output, from other random numbers.
        exact: The original in float64; None once it turned out not to run.
        full: The original's state dict as it was built.
        groups: Names of the same parameter in the original, for those that have several.
        rates: The dropout layers of the original with their probabilities.
        notes: What a reader of the report should know.
        source: The original's file and hash.
        share: This rank's parameters, as a share of the original's; None before they are built.

    Args:
        job: What `run.py` wrote.
        rank: This process's number.
        stage: Told what is being done.
    """

    def __init__(self, job: dict[str, Any], rank: int, stage: Stage) -> None:
        self.job, self.rank, self.world, self.stage = job, rank, int(job["world"]), stage
        self.notes: list[str] = []
        self.source: dict[str, str] | None = None
        self.share: float | None = None

    def load(self) -> None:
        """Imports everything, joins the process group, builds the models."""
        job, stage = self.job, self.stage
        stage("loading the schedule")
        self.schedule = load_schedule(Path(job["schedule"]))
        self.twin: Any = load_file(Path(job["twin"]), "slapo_twin")
        self.blocker = ToolBlocker(job["tool"], Path(job["out"]))
        self.blocker.install()
        stage("importing the original")
        original = import_original(job["source"])
        if file := getattr(original, "__file__", None):
            digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
            self.source = {"file": file, "sha256": digest}
        stage("importing the output")
        rewritten, self.loading = import_output(Path(job["out"]), job["stem"])
        if self.world > 1:
            stage("joining the process group")
            self._join_group(Path(job["folder"]), float(job["deadline"]))
        self._build(original, rewritten)

    def _join_group(self, folder: Path, deadline: float) -> None:
        # Longer than the job lasts: this process is ended by its own clock, which says where it is.
        timeout = datetime.timedelta(seconds=max(1.0, deadline - time.time()) + 60)
        store = dist.FileStore(str(folder / "store"), self.world)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world, timeout=timeout
        )

    def _build(self, original: types.ModuleType, rewritten: types.ModuleType) -> None:
        self.stage("building the original")
        self.original = self._built(original, 0)
        vary_constants(self.original)
        self.full = {k: v.clone() for k, v in self.original.state_dict().items()}
        self.groups = tie_groups(self.original)
        self.aliases = {name: group for group in self.groups for name in group}
        self.stage("building the original in float64")
        exact = self._built(original, 0)
        exact.load_state_dict(self.full)
        self.exact: nn.Module | None = exact.double()
        self.stage("building the rewritten model")
        self.rewritten = self._built(rewritten, 1000 + self.rank)
        self.rates = {n: m.p for n, m in self.original.named_modules() if is_dropout(m)}
        if any(p > 0 for model in self.models() for *_, p in dropouts(model, configs=True)):
            self.notes.append("dropout is set to 0 in both models")
        self.set_dropout(lambda path: 0.0, configs=True)
        sizes = [sum(p.numel() for p in m.parameters()) for m in (self.rewritten, self.original)]
        self.share = sizes[0] / max(1, sizes[1])

    def _built(self, module: types.ModuleType, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model: nn.Module = self.twin.build_small(self.schedule, module)
        return model.float().train()

    def models(self) -> list[nn.Module]:
        """Original, rewritten, and the original in float64 while it runs."""
        return [self.original, self.rewritten, *([] if self.exact is None else [self.exact])]

    def set_dropout(self, rate: Callable[[str], float], *, configs: bool) -> None:
        """Sets every dropout probability.

        Args:
            rate: Gets a dropout layer's path, or "" for an attribute of another module.
            configs: Whether the models' configs are set as well.
        """
        for model in self.models():
            paths = {id(module): path for path, module in model.named_modules()}
            for holder, name, _ in list(dropouts(model, configs=configs)):
                setattr(holder, name, rate(paths[id(holder)] if is_dropout(holder) else ""))

    def agree(self, names: Iterable[str]) -> set[str]:
        """What every rank names; every rank calls it."""
        if self.world == 1:
            return set(names)
        everywhere: list[list[str]] = [[] for _ in range(self.world)]
        dist.all_gather_object(everywhere, sorted(names))
        return set(everywhere[0]).intersection(*everywhere[1:])

    def to_full(self, named: Named) -> Named:
        """Full tensors from this rank's, on all ranks together; only what all ranks have."""
        named = {name: tensor.detach() for name, tensor in named.items()}
        common = self.agree(named)
        named = {name: tensor for name, tensor in named.items() if name in common}
        if self.loading is None:
            return named
        return dict(self.loading.to_full(self.rewritten, named))

    def full_state(self) -> Named:
        """The rewritten model's state dict under the original's names."""
        if self.loading is None:
            return dict(self.rewritten.state_dict())
        return dict(self.loading.full_state_dict(self.rewritten))

    def find(self, named: Named, names: list[str]) -> Named:
        """What `named` has of `names`, by whichever name of a tied parameter."""
        found = {}
        for name in names:
            known = [n for n in (name, *self.aliases.get(name, [])) if n in named]
            if known:
                found[name] = named[known[0]]
        return found

    def join_outputs(self, got: Named, want: Named) -> tuple[Named, list[str]]:
        """Puts outputs together that are cut over the ranks, and names them."""
        if self.world == 1:
            return got, []
        got, joined = dict(got), []
        everywhere: list[dict[str, list[int]]] = [{} for _ in range(self.world)]
        dist.all_gather_object(everywhere, {k: list(got[k].shape) for k in want if k in got})
        for key, full in want.items():
            shapes = [shapes[key] for shapes in everywhere if key in shapes]
            if len(shapes) < self.world or any(len(s) != full.dim() for s in shapes):
                continue
            cut = [a for a in range(full.dim()) if any(s[a] != full.shape[a] for s in shapes)]
            if len(cut) == 1 and sum(s[cut[0]] for s in shapes) == full.shape[cut[0]]:
                parts: list[Any] = [None] * self.world
                dist.all_gather_object(parts, got[key])
                got[key] = torch.cat(parts, cut[0])
                joined.append(key)
        return got, joined

    def make_inputs(self) -> None:
        """Makes the inputs that every step gets."""
        self.stage("making the inputs")
        self.inputs = self.twin.step_inputs(self.schedule, self.original)

    def inputs_for(self, model: nn.Module) -> dict[str, Any]:
        """A copy of the inputs that `model` may change."""

        def fresh(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: fresh(part) for key, part in value.items()}
            if type(value) in (list, tuple):
                return type(value)(fresh(part) for part in value)
            if not isinstance(value, Tensor):
                return value
            value = value.detach().clone()
            return value.double() if model is self.exact and value.is_floating_point() else value

        return {name: fresh(value) for name, value in self.inputs.items()}

    def step(self, model: nn.Module, seed: int = 0) -> tuple[Named, Tensor]:
        """One forward and backward: all output tensors, and the loss."""
        model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        outputs = model(**self.inputs_for(model))
        loss: Tensor = self.twin.loss_of(self.schedule, outputs)
        loss.backward()  # type: ignore[no-untyped-call]
        return {k: v.detach() for k, v in tensors_in(outputs).items()}, loss.detach()

    def evaluate(self, model: nn.Module, without: str | None = None) -> Named:
        """All output tensors in eval mode, without one of the inputs if that is named."""
        inputs = self.inputs_for(model)
        inputs.pop(str(without), None)
        model.eval()
        try:
            with torch.no_grad():
                return tensors_in(model(**inputs))
        finally:
            model.train()

    def exactly(self, action: Callable[[nn.Module], Any]) -> Any:
        """What `action` gives for the original in float64; None where that does not run."""
        if self.exact is None:
            return None
        try:
            return action(self.exact)
        except Exception as error:
            self.exact = None
            words = str(error).strip().splitlines() or [type(error).__name__]
            self.notes.append(f"the original does not run in float64: {words[0]}")
            return None
