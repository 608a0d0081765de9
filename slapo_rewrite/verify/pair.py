"""The pair of original and rewritten model on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from .figures import Named, tensors_in
from .original import SEED, Original, from_all_ranks
from .probes import change_weights, dropouts, in_float64, is_dropout


class Pair(Original):
    """Both models, and the original in float64 as the reference for both.

    Attributes:
        rewritten: The model built from the output; its weights are then overwritten.
        start: Its full state dict as built from the original's seed; None with several ranks if
            the output has no `loading.build`, since each rank then initializes its own shards.
        rates: The probabilities of the original's dropout layers, by path.
    """

    start: Named | None = None

    def load(self) -> None:
        """Imports the modules, joins the process group and builds the models."""
        self.import_all()
        self.join_group()
        self.build_original()
        self.stage("building the rewritten model")
        build = getattr(self.loading, "build", None)
        if build is None:
            self.rewritten = self.built(self.rewritten_module, SEED)
        else:
            self.rewritten = build(lambda: self.built(self.rewritten_module, SEED))
        if self.world == 1 or build is not None or self.loading is None:
            self.start = {name: tensor.clone() for name, tensor in self.full_state().items()}
        change_weights(self.rewritten, 1000 + self.rank)
        self.rates = {n: m.p for n, m in self.original.named_modules() if is_dropout(m)}
        if any(p > 0 for model in self.models() for *_, p in dropouts(model, configs=True)):
            self.note("dropout is set to 0 in both models")
        self.set_dropout(lambda path: 0.0, configs=True)
        self.hold(self.rewritten)

    def double(self) -> None:
        """Rebuilds both models in float64, with the same weights."""
        self.stage("building both models in float64")
        self.doubled, self.exact = True, None
        self.original = self.built(self.original_module, 0)
        self.original.load_state_dict(self.full)
        self.rewritten = self.built(self.rewritten_module, 1000 + self.rank)
        self.rewritten.load_state_dict(self.full, strict=True)
        self.set_dropout(lambda path: 0.0, configs=True)

    def models(self) -> list[nn.Module]:
        """Original, rewritten, and `exact` if there is one."""
        return [self.original, self.rewritten, *([] if self.exact is None else [self.exact])]

    def set_dropout(self, rate: Callable[[str], float], *, configs: bool) -> None:
        """Sets every dropout probability.

        Args:
            rate: Gives the probability for a dropout layer's path; other modules' path is "".
            configs: Whether to set those in the models' configs too.
        """
        for model in self.models():
            paths = {id(module): path for path, module in model.named_modules()}
            for holder, name, _ in list(dropouts(model, configs=configs)):
                setattr(holder, name, rate(paths[id(holder)] if is_dropout(holder) else ""))

    def agree(self, names: Iterable[str]) -> set[str]:
        """The names that all ranks have in common; every rank has to call it."""
        first, *others = from_all_ranks(sorted(names))
        return set(first).intersection(*others)

    def any_of(self, names: Iterable[str]) -> bool:
        """Whether any rank has a name; every rank has to call it."""
        return any(from_all_ranks(sorted(names)))

    def to_full(self, named: Named) -> Named:
        """Full tensors of those that all ranks have; every rank has to call it."""
        named = {name: tensor.detach() for name, tensor in named.items()}
        common = self.agree(named)
        return self.whole(self.rewritten, {name: named[name] for name in named if name in common})

    def full_state(self) -> Named:
        """The rewritten model's full state dict, with the original's names."""
        if self.loading is None:
            return dict(self.rewritten.state_dict())
        return dict(self.loading.full_state_dict(self.rewritten))

    def join_outputs(self, got: Named, want: Named) -> tuple[Named, list[str]]:
        """Joins outputs that are sharded over the ranks; also returns the names of these."""
        if self.world == 1:
            return got, []
        got, joined = dict(got), []
        everywhere = from_all_ranks({k: list(got[k].shape) for k in want if k in got})
        for key, full in want.items():
            shapes = [known[key] for known in everywhere if key in known]
            if len(shapes) < self.world or any(len(s) != full.dim() for s in shapes):
                continue
            cut = [a for a in range(full.dim()) if any(s[a] != full.shape[a] for s in shapes)]
            if len(cut) == 1 and sum(s[cut[0]] for s in shapes) == full.shape[cut[0]]:
                got[key] = torch.cat(from_all_ranks(got[key]), cut[0])
                joined.append(key)
        return got, joined

    def make_inputs(self) -> None:
        """Makes the inputs, the same for every step."""
        self.stage("making the inputs")
        self.inputs = self.twin.step_inputs(self.schedule, self.original)

    def step(self, model: nn.Module, seed: int = 0) -> tuple[Named, Tensor]:
        """Runs forward and backward; returns all output tensors and the loss."""
        model.zero_grad(set_to_none=True)
        with self.twin.drawing(seed), in_float64(self.is_double(model)):
            outputs, given = self.outputs(model, self.inputs)
            loss: Tensor = self.twin.loss_of(self.schedule, outputs, given)
            loss.backward()  # type: ignore[no-untyped-call]
        return {k: v.detach() for k, v in tensors_in(outputs).items()}, loss.detach()

    def evaluate(self, model: nn.Module, without: str | None = None) -> Named:
        """All output tensors in eval mode, without the input `without` if given."""
        inputs = {name: value for name, value in self.inputs.items() if name != without}
        model.eval()
        try:
            with torch.no_grad(), self.twin.drawing(0), in_float64(self.is_double(model)):
                return tensors_in(self.outputs(model, inputs)[0])
        finally:
            model.train()
