"""Pairs of a model and a schedule, and their outcome: refused, right, wrong, or a failure."""

from __future__ import annotations

import itertools
import re
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # else imported somewhere inside, where time may be up

from slapo_rewrite import errors
from slapo_rewrite.emit.construct import Construction
from slapo_rewrite.emit.rewrite import Output, rewrite
from tests.soundness.numbers import (
    Numbers,
    Run,
    array,
    compare_rewritten,
    differences,
    double_precision,
    gradients,
    loaded,
    restored,
    step,
    varied,
)
from tests.soundness.ranks import RankError, Ranks

WORLDS = (2, 3, 4)
LIMIT = 1e-6
SINGLE, HALF = 1e-3, 0.05  # where the model computes in less precision on the way
TOOL_S = 60
PLAIN = "        h = h * 2.5\n"  # in the place of a statement

# What becomes of a pair. The first five are defects of the tool.
WRONG = "wrong"  # accepted without a warning, and its numbers are others
CRASHED = "crashed"  # an exception that is no `RewriteError`, or no end
FAILED = "fails"  # accepted, and cannot be built or run
UNMADE = "unmade"  # what was to be written does not work, and the tool sees it
UNPLACED = "unplaced"  # refused without a place
WARNED = "warned"  # accepted with a warning, and wrong or failing
LATE = "late"  # a size that does not fit, told in words, but by `forward`
RIGHT = "right"
REFUSED = "refused"
UNFIT = "unfit"  # refused at construction, in words, at every world size
MOOT = "moot"  # the original itself fails, or gives other numbers each time
DEFECTS = (WRONG, CRASHED, FAILED, UNMADE, UNPLACED)


@dataclass(frozen=True)
class Pair:
    """A model and a schedule.

    Attributes:
        source: The text of the model file.
        schedule: The text of the schedule file. Beside what every schedule has, it may have
            `flags`, a list of further arguments of `forward`, each a dictionary.
        name: What it is about.
        statement: The part of the source that is put to the test, if it is one.
    """

    source: str
    schedule: str
    name: str = ""
    statement: str = ""


@dataclass(frozen=True)
class Verdict:
    """What becomes of a pair.

    Attributes:
        kind: One of the words above.
        code: The error's code, or the class of the exception.
        text: More words.
        worlds: The world sizes at which it ran; the last one is where it went wrong.
    """

    kind: str
    code: str = ""
    text: str = ""
    worlds: tuple[int, ...] = ()

    @property
    def is_defect(self) -> bool:
        """Whether the tool is at fault."""
        return self.kind in DEFECTS


class MootError(Exception):
    """The original gives nothing to compare with."""


class TooLongError(BaseException):
    """The tool did not come to an end."""


@dataclass
class Judge:
    """Judges pairs, with ranks that stay alive.

    Attributes:
        ranks: They.
        worlds: The world sizes to run at.
        is_run: Whether the tool runs a small model before it writes, as it does for users. Without
            that the static check is alone.
    """

    ranks: Ranks
    worlds: tuple[int, ...] = WORLDS
    is_run: bool = True
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __call__(self, pair: Pair) -> Verdict:
        """What becomes of a pair."""
        number = next(self._numbers)
        folder = Path(tempfile.mkdtemp(prefix="pair"))
        before, path = set(sys.modules), list(sys.path)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self._judge(pair, folder, f"n{number}")
        finally:
            sys.path[:] = path
            for name in set(sys.modules) - before:
                if re.match(rf"\w*n{number}\b", name):
                    del sys.modules[name]
            shutil.rmtree(folder, ignore_errors=True)

    def _judge(self, pair: Pair, folder: Path, name: str) -> Verdict:
        source, schedule = folder / f"model_{name}.py", folder / "schedule.py"
        source.write_text(pair.source)
        schedule.write_text(pair.schedule)
        run = Construction._compare if self.is_run else lambda *_: None
        try:
            with mock.patch.object(Construction, "_compare", run):
                output = rewritten(source, schedule)
        except errors.RewriteError as error:
            return refusal(error)
        except (Exception, SystemExit, TooLongError) as error:
            return Verdict(CRASHED, type(error).__name__, traceback.format_exc())
        verdict = self._run(source, schedule, output.files)
        kind, text = verdict.kind, verdict.text
        if output.warnings and kind in (WRONG, FAILED):
            kind, text = WARNED, "\n".join([*output.warnings, text])
        if kind in DEFECTS:
            text += "\n" + output.diff(1)
        return replace(verdict, kind=kind, text=text)

    def _run(self, source: Path, schedule: Path, files: Mapping[str, str]) -> Verdict:
        """What the files of an output give, against the original."""
        name = source.stem.removeprefix("model_")
        try:
            state, wanted = original(source, schedule, f"original_{name}")
        except MootError as error:
            return Verdict(MOOT, text=str(error))
        package = source.parent / f"out_{name}"
        package.mkdir()
        for file, text in files.items():
            (package / file).write_text(text)
        precision = re.search(r"(float16|half)|(\.float\(|float32)", source.read_text())
        limit = LIMIT if precision is None else HALF if precision[1] else SINGLE
        fitting: list[int] = []
        for world in self.worlds:
            module = f"{package.name}.{source.stem}"
            args = (str(source.parent), module, state, wanted, limit)
            try:
                found = self.ranks.call(world, compare_rewritten, *args)
            except RankError as error:
                if error.kind == "ConstructionError":
                    continue
                kind = LATE if "does not divide over" in str(error) else FAILED
                return Verdict(kind, error.kind, f"world {world}: {error}", (*fitting, world))
            fitting.append(world)
            if different := [f"rank {r}: {d}" for r, ds in enumerate(found) for d in ds]:
                text = f"world {world}:\n" + "\n".join(different[:12])
                return Verdict(WRONG, "", text, tuple(fitting))
        return Verdict(RIGHT if fitting else UNFIT, worlds=tuple(fitting))

    def is_refused_in_vain(self, pair: Pair) -> bool:
        """Whether what was refused is right where it is put into what the tool writes without it."""
        number = next(self._numbers)
        with tempfile.TemporaryDirectory() as name:
            source, schedule = Path(name, f"model_n{number}.py"), Path(name, "schedule.py")
            source.write_text(pair.source.replace(pair.statement, PLAIN))
            schedule.write_text(pair.schedule)
            try:
                output = rewritten(source, schedule)
            except errors.RewriteError:
                return False
            model = output.files[output.model_file]
            files = {**output.files, output.model_file: model.replace(PLAIN, pair.statement)}
            source.write_text(pair.source)
            return self._run(source, schedule, files).kind == RIGHT


def refusal(error: errors.RewriteError) -> Verdict:
    """The verdict that a refusal is."""
    try:
        text = error.render()
    except Exception:
        return Verdict(CRASHED, error.code, traceback.format_exc())
    if error.exit_code != 2:
        return Verdict(UNMADE, error.code, text)
    placed = error.at is not None or error.also
    return Verdict(REFUSED if placed else UNPLACED, error.code, text)


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Ends what takes too long by an exception."""

    def stop(*_: object) -> None:
        raise TooLongError(f"no end within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def rewritten(source: Path, schedule: Path) -> Output:
    """What the tool makes of them."""
    with at_most(TOOL_S):
        return rewrite(str(source), str(schedule))


def original(
    source: Path, schedule: Path, name: str
) -> tuple[dict[str, Any], list[tuple[Run, Numbers]]]:
    """The original's weights, and what it gives: in training and in eval, for several inputs.

    Raises:
        MootError: It fails, or its numbers are random or not finite.
    """
    definitions: dict[str, Any] = {}
    try:
        with double_precision(), at_most(TOOL_S):
            exec(schedule.read_text(), definitions)
            torch.manual_seed(1)
            model = varied(definitions["model"](loaded(source, name)))
            state = {n: array(t) for n, t in model.state_dict().items()}
            torch.manual_seed(2)
            given = definitions["inputs"](model)
            wanted = []
            for run in runs(given, definitions.get("flags", ())):
                try:
                    numbers = numbers_of(model, run, state)
                    again = numbers_of(model, run, state) if not wanted else numbers
                except MootError:
                    raise
                except Exception:
                    if run.inputs is given:
                        raise
                    continue
                if differences("", again.outputs, numbers.outputs, 1e-12) or differences(
                    "", again.gradients, numbers.gradients, 1e-12
                ):
                    raise MootError("its numbers are random")
                wanted.append((run, numbers))
    except MootError:
        raise
    except (Exception, TooLongError) as error:
        raise MootError(f"{type(error).__name__}: {error}") from error
    return state, wanted


def runs(given: dict[str, Any], flags: Any) -> Iterator[Run]:
    """Steps with these arguments, with further ones, with other numbers, and with more rows."""
    yield Run("training", True, given)
    yield Run("eval", False, given)

    def other(change: Any) -> dict[str, Any]:
        return {
            k: change(v) if isinstance(v, torch.Tensor) and v.dim() else v for k, v in given.items()
        }

    values = other(lambda t: 0.4 - 1.5 * t if t.is_floating_point() else t)
    yield Run("other values", True, values)
    yield Run("more rows", True, other(lambda t: torch.cat([t, t.flip(0)])))
    for flag in flags:
        words = ", ".join(f"{k}={'...' if hasattr(v, 'shape') else v}" for k, v in flag.items())
        yield Run(f"training, {words}", True, {**given, **flag})
        yield Run(f"eval, {words}", False, {**given, **flag})


def numbers_of(model: torch.nn.Module, run: Run, state: Mapping[str, Any]) -> Numbers:
    """What the original gives.

    Raises:
        MootError: Numbers that say nothing.
    """
    restored(model, state)
    outputs = step(model, run)
    finite = [bool(torch.isfinite(torch.from_numpy(a)).any()) for a in outputs.values()
              if hasattr(a, "shape") and a.size]  # fmt: skip
    if finite and not any(finite):
        raise MootError("its outputs are not finite")
    grads = {n: array(t) for n, t in gradients(model).items()} if run.training else {}
    return Numbers(outputs, grads, {n: array(t) for n, t in model.state_dict().items()})
