"""Every model family of the installed transformers, with a schedule that nobody wrote.

    python -m benchmark.zoo --seconds 3600 --jobs 2

Each family runs in a separate process, with a time limit. Its outcome is in `results/zoo.json`; a
run continues where the last one ended, in an order drawn once, so that the results are always a
sample of all families. Measured for each:

- identity: an empty schedule gives the file back.
- auto: `--schedule auto` finds a schedule; the output equals the original at world sizes 1 and 2,
  in real processes: outputs, every gradient, buffers, weights after three steps.
- checkpoint, fuse: the same file with `ckpt_ratio=1.0` and with `fuse=true`, at world size 1.
- stages: with `pipeline_stages=2`, on two processes.

Refusals, and measurements that did not finish in time, are recorded with the reason. With
`--columns` the families of `--only` are measured again in these columns only.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import random
import re
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark import report

if TYPE_CHECKING:
    from slapo_rewrite.verify.launch import ForkServer

NAME = "zoo"
RECORDS = report.FOLDER / "results" / f"{NAME}.json"
LIMIT_S = 420
# What ranks import, whatever the family.
SHARED = ("torch", "transformers.modeling_utils", "torch.distributed.pipelining")
COLUMNS = ("identity", "auto", "checkpoint", "fuse", "stages")
RIGHT = "right"


def families() -> list[str]:
    """The modeling modules of the installed transformers, in an order drawn once."""
    import transformers

    folder = Path(transformers.__file__).parent / "models"
    files = sorted(folder.glob("*/modeling_*.py"))
    names = [f"transformers.models.{f.parent.name}.{f.stem}" for f in files]
    random.Random(1).shuffle(names)
    return names


def outcomes(
    name: str, server: ForkServer, limit_s: float, columns: Sequence[str] = COLUMNS
) -> Iterator[dict[str, Any]]:
    """The growing outcome of one family; runs user code, so in a separate process.

    Args:
        name: The modeling module.
        server: Starts the ranks.
        limit_s: Seconds that it is given.
        columns: What is measured, beside identity.
    """
    from slapo_rewrite import errors
    from slapo_rewrite.auto.derive import derive

    found: dict[str, Any] = {"family": name}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        try:
            derived = derive(name)
        except errors.RewriteError as error:
            yield found | {"auto": f"refused: {error.message}"}
            return
        found["model"], found["share"] = derived.title.split()[0], round(derived.share, 3)
        found["seconds"] = round(time.perf_counter() - start, 2)
        file = at / "s.py"
        file.write_text(derived.text, encoding="utf-8")
        found["identity"] = _attempt(lambda: _identity(name, at, derived.head))
        one = ["tensor_parallel=false"] if "tensor_parallel:" in derived.text else []
        cases: dict[str, tuple[list[str], list[int] | None]] = {
            "auto": ([], [1, 2]),
            "fuse": ([*one, "fuse=true"], [1]),
            "checkpoint": ([*one, "ckpt_ratio=1.0"], [1]),
            "stages": ([*one, "pipeline_stages=2", "pipeline_engine=torch"], None),
        }
        cases = {column: case for column, case in cases.items() if column in columns}
        for column in cases:
            found[column] = _late(limit_s)
        for column, (settings, worlds) in cases.items():
            if column == "checkpoint" and "ckpt_ratio:" not in derived.text:
                found[column] = f"refused: {derived.why}"
                continue
            yield found
            out = at / column
            found[column] = _attempt(
                lambda out=out, settings=settings, worlds=worlds: _verified(
                    name, file, out, settings, worlds, server, limit_s / 3
                )
            )
    yield found


def _late(limit_s: float) -> str:
    return f"unfinished: not done in {limit_s:.0f} s"


def _attempt(action: Callable[[], str]) -> str:
    from slapo_rewrite import errors

    try:
        return action()
    except errors.RewriteError as error:
        return f"refused: {error.message}"
    except Exception as error:
        return f"crashed: {type(error).__name__}: {error} {traceback.format_exc()[-300:]}"


def _identity(name: str, folder: Path, head: str) -> str:
    from slapo_rewrite.emit.rewrite import rewrite

    file = folder / "empty.py"
    file.write_text(f"{head}\n\ndef schedule(s):\n    pass\n", encoding="utf-8")
    output = rewrite(name, str(file))
    same = output.files[output.model_file] == output.originals[output.model_file].absolute
    return RIGHT if same else "wrong: the file differs"


def _verified(
    name: str,
    file: Path,
    out: Path,
    settings: list[str],
    worlds: list[int] | None,
    server: ForkServer,
    timeout_s: float,
) -> str:
    from slapo_rewrite.emit.rewrite import rewrite
    from slapo_rewrite.emit.write import write
    from slapo_rewrite.verify.run import chosen, stages_of, verify

    output = rewrite(name, str(file), settings)
    write(out, output.files)
    # The whole model with stages is what an empty schedule gives.
    asked = chosen(out, worlds, pipe=stages_of(out) or None)
    found = verify(out, asked, source=name, schedule=str(file), timeout_s=timeout_s, server=server)
    if found.ok:
        return RIGHT
    words = " ".join(found.render().split())
    words = re.sub(r'(/[^/" ]+)+/(?=[^/" ]+/[^/" ]+\.py)', "", words)  # of this machine
    kind = "unfinished" if "not done after" in words else "wrong"
    return f"{kind}: {words[-400:]}"


def in_process(
    name: str, outcomes: Callable[[], Iterator[dict[str, Any]]], limit_s: float
) -> dict[str, Any]:
    """The last outcome of a family in a fork of this process, which has imported what all need.

    Args:
        name: The modeling module.
        outcomes: Gives more of the outcome each time.
        limit_s: Seconds that it is given.
    """
    read, write = multiprocessing.get_context("fork").Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        code = 1
        try:
            import logging
            import warnings

            logging.disable(logging.CRITICAL)
            warnings.simplefilter("ignore")
            for found in outcomes():
                write.send(found)
            code = 0
        except BaseException as error:
            words = f"crashed: {type(error).__name__}: {error} {traceback.format_exc()[-300:]}"
            write.send({"family": name, "auto": words})
        finally:
            os._exit(code)
    write.close()
    found = {"family": name, "auto": _late(limit_s)}
    deadline = time.monotonic() + limit_s
    try:
        while read.poll(max(0, deadline - time.monotonic())):
            found = read.recv()
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except EOFError:  # it ended by itself
        if os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
            found["auto"] = "crashed: the process died"
    return found


def known() -> dict[str, dict[str, Any]]:
    """The outcomes that are there, by family."""
    if not RECORDS.exists():
        return {}
    return {found["family"]: found for found in report.read(NAME)["families"]}


def results(done: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The results to write: versions, and every outcome in the order of the families."""
    packages = report.versions(("torch", "transformers"))
    return {"versions": packages, "families": [done[n] for n in families() if n in done]}


def runs(found: dict[str, Any]) -> bool:
    """Whether the original ran a training step on generated inputs."""
    return "identity" in found


def is_unfinished(found: dict[str, Any]) -> bool:
    """Whether something was not done in time; the next run tries it again."""
    return any(str(value).startswith("unfinished") for value in found.values())


def table(outcomes: Iterable[dict[str, Any]]) -> str:
    """How many families came out right, for each column."""
    outcomes = list(outcomes)
    ran = [found for found in outcomes if runs(found)]
    lines = [
        f"| of {len(ran)} families whose original runs | right | refused | not right |",
        "| --- | ---: | ---: | ---: |",
    ]
    for column in COLUMNS:
        kinds = Counter(found.get(column, "refused").split(":")[0] for found in ran)
        right = kinds.pop(RIGHT, 0)
        refused = kinds.pop("refused", 0)
        lines.append(
            f"| {column} | {right} ({right / max(1, len(ran)):.0%}) | {refused} "
            f"| {sum(kinds.values())} |"
        )
    quarter = _quarter_split(ran)
    share = len(quarter) / max(1, len(ran))
    lines.append(f"| auto, a quarter or more split | {len(quarter)} ({share:.0%}) | | |")
    late = sum(is_unfinished(found) for found in outcomes if not runs(found))
    rest = len(outcomes) - len(ran) - late
    lines.append("")
    lines.append(f"Not counted: {rest} families do not run on generated inputs, and {late} did not")
    lines.append("finish in time.")
    return "\n".join(lines) + "\n"


def _quarter_split(ran: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The families that are right with a quarter or more of their parameters split."""
    return [found for found in ran if found["auto"] == RIGHT and found["share"] >= 0.25]


def summary(outcomes: Iterable[dict[str, Any]]) -> str:
    """The sentence about them in the project's README."""
    ran = [found for found in outcomes if runs(found)]
    right = [found for found in ran if found["auto"] == RIGHT]
    quarter = _quarter_split(ran)
    return (
        f"{len(right)} of {len(ran)} families of `transformers` that run on generated inputs "
        f"pass this verification at two ranks. {len(quarter)} of them have a quarter or more of "
        "their parameters split"
    )


def reasons(outcomes: Iterable[dict[str, Any]], column: str, most: int = 12) -> list[str]:
    """Why families did not come out right, the most frequent reasons first."""
    found = [f.get(column, "") for f in outcomes if f.get(column, RIGHT) != RIGHT]
    return [f"{count} {text}" for text, count in Counter(t[:160] for t in found).most_common(most)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="when to stop beginning more")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one family")
    parser.add_argument("--jobs", type=int, default=1, help="families at once")
    parser.add_argument("--only", nargs="+", help="families by a part of their names, again")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS[1:], help="only these, of --only")
    parser.add_argument("--reasons", action="store_true", help="only say why, of what is there")
    options = parser.parse_args()
    if options.reasons:
        for column in COLUMNS:
            print(column, *reasons(known().values(), column), sep="\n  ")
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    import transformers.modeling_utils  # noqa: F401  what every family needs
    from rich.progress import Progress

    torch.set_num_threads(1)
    importlib.import_module("slapo_rewrite.auto.derive")
    server = importlib.import_module("slapo_rewrite.verify.launch").ForkServer(SHARED)
    done = known()
    # Those that nobody has tried come first: what was late once costs the whole limit again.
    names = [n for n in families() if n not in done]
    names += [n for n in families() if n in done and is_unfinished(done[n])]
    if options.only:
        names = [n for n in families() if any(part in n for part in options.only)]
    end = time.monotonic() + options.seconds

    def run(name: str) -> None:
        if time.monotonic() < end:
            limit_s = options.limit
            columns = options.columns or COLUMNS
            found = in_process(name, lambda: outcomes(name, server, limit_s, columns), limit_s)
            if options.columns:  # what was not measured stays as it is known
                before = done.get(name, found)
                if runs(found) and found["model"] == before.get("model"):
                    found = {**before, **{column: found[column] for column in columns}}
                else:
                    found = before
            done[name] = found
            RECORDS.write_text(json.dumps(results(done), indent=1) + "\n", encoding="utf-8")
            progress.console.print(name.rpartition("_")[2], {c: found.get(c) for c in COLUMNS})
        progress.advance(task)

    with server, Progress() as progress, ThreadPoolExecutor(options.jobs) as pool:
        task = progress.add_task("families", total=len(names))
        list(pool.map(run, names))
    report.write(NAME, results(done), table(done.values()))


if __name__ == "__main__":
    main()
