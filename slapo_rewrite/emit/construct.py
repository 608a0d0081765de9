"""Imports, builds and runs an output before it is written."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from slapo_rewrite import errors
from slapo_rewrite.changes.around_forward import WrapForward
from slapo_rewrite.changes.carried_over import check_held
from slapo_rewrite.changes.change import Change
from slapo_rewrite.changes.mixed_precision import HalfPrecision
from slapo_rewrite.changes.recomputation import Recomputed
from slapo_rewrite.directive import Directive, needed_depth
from slapo_rewrite.emit.built_output import BuiltOutput
from slapo_rewrite.emit.draft import Draft, Trial
from slapo_rewrite.emit.idle_methods import check_run
from slapo_rewrite.emit.registrations import imported_beside
from slapo_rewrite.emit.sibling_files import SiblingFiles
from slapo_rewrite.groups import grouped
from slapo_rewrite.model.emitted import Emitted, FailedOutput
from slapo_rewrite.model.rehearsal import (
    MOST_ELEMENTS,
    MOST_OF_SMALL,
    Changed,
    NotComparedError,
    Rehearsed,
    TooLargeError,
    rehearse,
    worlds,
)
from slapo_rewrite.model.short_build import ALL, Shortening
from slapo_rewrite.model.step_results import OtherNumbersError
from slapo_rewrite.model.tree import Node, Tree
from slapo_rewrite.primitives.step_in_backward import StepInBackward
from slapo_rewrite.project import Project
from slapo_rewrite.schedule.plan import Plan

# The begin of the warning that no number of ranks fits the small model.
UNFIT = "the split layers were not compared with the original: the small model does not fit"
TOO_LARGE = (
    f"the small model has more than {MOST_OF_SMALL:,} parameters, or inputs of more than "
    f"{MOST_ELEMENTS:,} elements, so the last check, a run against the original, was left out: "
    "define a smaller verify_model(m), and inputs(model), in the schedule"
)


@dataclass(frozen=True)
class Construction:
    """Everything needed to check an output by building it."""

    draft: Draft  # the output
    project: Project  # the source, the schedule and the model
    plan: Plan  # the schedule's requests
    copies: SiblingFiles  # the files that are rewritten
    anew: Sequence[str]  # modules that the output imports again, by name
    original: types.ModuleType  # the module of the source as it was before the schedule ran
    sizes: tuple[int, ...]  # the world sizes to run on; none for a model that is too large
    said: Sequence[str]  # the warnings so far

    def tried(self, trial: Trial | None) -> None:
        """Builds the output's model, and calls the trial with it.

        Without a trial, runs a small model of the output against the original's.
        """
        draft, project = self.draft, self.project
        with project.timed("construct"), imported_beside(draft, self.copies, self.anew) as emitted:
            built, short = self._built_short(emitted)
            check_run(emitted, draft, built, project.module)
            if trial is not None:
                trial(emitted, short)
            else:
                self._compare(emitted)

    def _built_short(self, emitted: Emitted) -> tuple[Tree, Shortening]:
        """Builds the output's model with a few of each kind of layers, and returns which.

        If that fails, it is built with all layers.
        """
        alike = self.copies.outputs.stands_for()

        def kinds(listed: Node) -> list[str]:
            return [alike.get(each.path, each.path) for each in listed.children.values()]

        short = Shortening.of(self.project.tree, kinds).by(emitted.instead_of)
        try:
            built = self._built(emitted, short)
        except (errors.RewriteError, FailedOutput):
            built = None
        if built is not None and short.is_of(built.root.live):
            return built, short
        built = self._built(emitted)
        return built, Shortening.of(built)

    def _built(self, emitted: Emitted, short: Shortening = ALL) -> Tree:
        """Builds the output's model and checks that it is what was scheduled."""
        project, copies, states = self.project, self.copies, self.plan.states
        is_split = any(state.shards for state in states.values())
        built = emitted.tree(project.schedule.module.model, 2 if is_split else 1, short)
        copies.check_built(built, project.tree, project.changes)
        BuiltOutput(emitted, built, project, copies.outputs, states).check()
        return built

    def _compare(self, emitted: Emitted) -> None:
        """Runs a small model of the output against the original's."""
        draft = self.draft
        # Without changes nothing is compared: a class of transformers is only in another package.
        sizes, project = self.sizes, self.project
        if not sizes and self._called(Recomputed):  # only checks which state a run changes
            sizes = worlds(project.schedule.module, project.module, project.tree.root.live)
        if not sizes or not any(draft.changes.values()):
            return
        with self.project.timed("rehearse"):
            try:
                rehearsed = self._rehearsed(emitted, sizes)
            except TooLargeError:
                draft.warnings.append(TOO_LARGE)
                return
            except NotComparedError as error:
                if error.__cause__ and (own := self.project.schedule.blamed(error.__cause__)):
                    raise own from None
                draft.warnings.append(
                    f"nothing was compared with the original, whose small model {error}"
                )
                return
        draft.warnings += self._idle(rehearsed.uncalled)
        if rehearsed.apart:
            held = " and ".join(f"`{name}`" for name in rehearsed.apart[:2])
            draft.warnings.append(
                f"no state dict holds {held}, which a rank computes differently from the "
                "original: begin with `loading.build`, even if weights are loaded"
            )
        if rehearsed.unfit:
            tried = " or ".join(map(str, self.sizes))
            draft.warnings.append(
                f"{UNFIT} {tried} ranks ({rehearsed.unfit}): define a verify_model(m) that fits, "
                "and verify the output"
            )

    def _called(self, *kinds: type[Change]) -> dict[str, Directive]:
        """The paths of modules with a request of these kinds, each with the directive."""
        states = self.plan.states.items()
        asked = {path: [a for k in kinds for a in state.asks(k)] for path, state in states}
        return {path: found[0][1] for path, found in asked.items() if found}

    def _idle(self, uncalled: Collection[str]) -> Iterator[str]:
        """Warnings about requests without effect, since their modules are never called."""
        wrapped = self._called(WrapForward).items()
        found = grouped((cause, path) for path, cause in wrapped if path in uncalled)
        for cause, paths in found.items():
            others = f" and {len(paths) - 1} more" if paths[1:] else ""
            words = f"`{cause.text}` does nothing for `{paths[0]}`{others}: training calls modules "
            yield errors.warning(f"{words}inside, and not that itself; select these", cause.at)

    def _rehearsed(self, emitted: Emitted, sizes: tuple[int, ...]) -> Rehearsed:
        plan, schedule = self.plan, self.project.schedule.module
        draws_alike = not any(state.replacement for state in plan.states.values())
        is_mixed, updates = (
            any(state.asks(change) for state in plan.states.values())
            for change in (HalfPrecision, StepInBackward)
        )
        depth = needed_depth(plan.directives)
        given = (schedule, self.original, emitted, sizes, depth)
        recomputed, files = self._called(Recomputed), self.copies.outputs

        def check(path: str, changed: Changed) -> None:
            if path in recomputed:
                check_held(files, self.project.tree.nodes[path], changed, recomputed[path])

        called = self._called(WrapForward, Recomputed)
        try:
            return rehearse(*given, draws_alike, is_mixed, updates, called, check, bool(self.sizes))
        except OtherNumbersError as error:
            inside = [path for path in plan.states if path and error.name.startswith(f"{path}.")]
            near = [plan.states[path].causes() for path in sorted(inside, key=len, reverse=True)]
            causes = [*(c for found in near for c in found), *plan.directives]
            places = list(dict.fromkeys(c.at for c in causes if c.at is not None))
            unfollowed = [words for words in self.said if "not followed: " in words]
            raise errors.OtherNumbers(
                f"this schedule gives another model: {error}",
                at=places[0] if places else None,
                also=places[1:3],
                hint="; ".join([error.hint, *unfollowed]),
            ) from error
