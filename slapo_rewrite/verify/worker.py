"""The process of one rank of a verification.

    python -P worker.py JOB RANK

JOB is a JSON file that `launch.py` writes. The schedule is loaded first; from then on nothing can
import the tool, as on a machine without it. In the job's folder, `RANK.json` gets the results,
`RANK.stage` the current step, `RANK.checks` the checks that are done, and `RANK.hang` the
traceback if it hangs.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

PARTS = "slapo_verify"  # this folder's name as a package, since the tool cannot be imported
Result = dict[str, Any]


def main(arguments: Sequence[str]) -> None:
    """Runs one rank and ends the process, with status 1 if not everything was compared."""
    job: dict[str, Any] = json.loads(Path(arguments[0]).read_text())
    rank, folder = int(arguments[1]), Path(job["folder"])
    sys.path[:] = [*job["sys_path"], *(p for p in sys.path if p not in job["sys_path"])]
    package = types.ModuleType(PARTS)
    package.__path__ = [str(Path(__file__).parent)]
    sys.modules[PARTS] = package
    result: Result = {}
    stages: list[str] = []

    def stage(name: str) -> None:
        stages.append(name)
        write(folder / f"{rank}.stage", name)

    with open(folder / f"{rank}.hang", "w") as hang:
        # Ends this process even if the one that started it is gone.
        left_s = max(0.1, job["deadline"] - time.time())
        faulthandler.dump_traceback_later(left_s, exit=True, file=hang)
        try:
            compare(job, rank, stage, result)
        except BaseException as error:
            result["error"] = {
                "stage": stages[-1] if stages else "starting",
                "type": type(error).__name__,
                "message": words_of(error),
                "traceback": traceback.format_exc(),
                "time": time.time(),
            }
        write(folder / f"{rank}.json", json.dumps(result))
        failed = "error" in result or result["stopped"]
        if job["world"] > 1 and not failed:
            stage("waiting for the other ranks")
            importlib.import_module("torch.distributed").barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if failed else 0)  # without waiting for pending collectives


def words_of(error: BaseException) -> str:
    """The message of an error, with those of the errors that caused it."""
    words = str(error).strip()
    if error.__cause__ is None:
        return words
    return f"{words}\nbecause of {type(error.__cause__).__name__}: {words_of(error.__cause__)}"


def write(path: Path, text: str) -> None:
    """Writes a file atomically, since another process may read it at any time."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def compare(job: dict[str, Any], rank: int, stage: Callable[[str], None], result: Result) -> None:
    """Builds both models and compares them; `result` gets what was found, even after an error.

    If the job has `fits`, only checks whether the rewritten one can be built on so many ranks.
    """
    stage("importing torch")
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    if job["fits"]:
        original = importlib.import_module(f"{PARTS}.original").Original(job, rank, stage)
        original.import_all()
        result.update(stopped=False, misfit=original.misfit(job["fits"]))
        return
    stopped = importlib.import_module(f"{PARTS}.figures").StoppedError
    told = Path(job["folder"]) / f"{rank}.checks"

    def tell(decided: bool = False) -> None:
        # None for an error beyond its limit: it may be rounding, which is decided at the end.
        found = ((c, c.ok or decided or c.error is None) for c in checks.done)
        write(told, json.dumps({c.name: c.ok if is_known else None for c, is_known in found}))

    def next_stage(name: str) -> None:
        tell()  # the checks of the previous step are done now
        stage(name)

    pair, checks = models_and_checks(job, rank, next_stage)
    result["stopped"] = False
    try:
        pair.load()
        checks.run()
    except stopped:
        result["stopped"] = True
    finally:
        tell(decided=True)
        result["checks"] = [asdict(check) for check in checks.done]
        result.update(source=pair.source, share=pair.share, notes=pair.notes, module=checks.module)


def models_and_checks(job: dict[str, Any], rank: int, stage: Callable[[str], None]) -> Any:
    """The models and checks for the whole model, or for its pipeline."""
    if job["layout"] is None:
        pair = importlib.import_module(f"{PARTS}.pair").Pair(job, rank, stage)
        return pair, importlib.import_module(f"{PARTS}.checks").Checks(pair)
    staged = importlib.import_module(f"{PARTS}.staged").Staged(job, rank, stage)
    return staged, importlib.import_module(f"{PARTS}.stage_checks").StageChecks(staged)


if __name__ == "__main__":
    main(sys.argv[1:])
