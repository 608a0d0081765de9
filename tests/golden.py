"""Makes the outputs in `generated/` again: `python -m tests.golden`."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.locate import locate
from slapo_rewrite.code.splice import apply_edits
from slapo_rewrite.emit import record
from slapo_rewrite.emit.rewrite import Output, rewrite
from slapo_rewrite.emit.sibling_files import absolute_imports

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ROOT / "generated"
TABLE = "README.md"

# Models whose schedules offer it.
SEQUENCE_PARALLEL = ("bert", "gpt", "gpt2", "llama")
# GPT-2's offers it as well; stages take seconds to write.
PIPELINE = ("bert", "gpt", "llama", "t5")
# Models whose schedule `--schedule auto` has worked out; it lies beside their outputs.
WORKED_OUT = ("albert", "gpt_neo", "opt", "roberta")

HEAD = """# Outputs of the bundled schedules

`make generated` writes this folder. A test fails if it is not current.

- Outputs of transformers' models: git keeps `rewrite.diff`, `rewrite.json` and the helper files.
  `make generated` writes the model files beside them.
- The GPT is a model of this repository (`tests/models/gpt.py`). Its outputs are complete here.
- For ALBERT, GPT-Neo, OPT and RoBERTa no schedule is bundled. `--schedule auto` wrote the
  `schedule.py` beside their outputs.

"""
COLUMNS = (
    "output",
    "lines of the original",
    "of these kept",
    "imports made absolute",
    "hunks",
    "lines added",
    "lines of helper files",
)
TAIL = """

A relative import becomes absolute, because the file leaves its package. Such lines do not count as
unchanged, and they are not counted in hunks and added lines.
"""


@dataclass(frozen=True)
class Golden:
    """One output.

    Attributes:
        model: The model's name.
        name: What the schedule's knobs make of it.
        source: The source, as a user gives it.
        schedule: The schedule, as a user gives it.
        settings: Knobs, as `name=value`.
    """

    model: str
    name: str
    source: str
    schedule: str
    settings: tuple[str, ...]

    @property
    def folder(self) -> str:
        """Where it lies in `generated/`."""
        return f"{self.model}/{self.name}"

    @property
    def committed_whole(self) -> bool:
        """Whether the model file is in git: the text of other people's models is not."""
        return not self.source.startswith("transformers.")

    def make(self, by: Callable[..., Output] = rewrite) -> Output:
        """Rewrites, from the root of the repository, so that a record holds no other path."""
        with contextlib.chdir(ROOT):
            output = by(self.source, self.schedule, self.settings)
        output.files[record.NAME] = record.comparable(output.files[record.NAME])
        return output


def goldens() -> Iterator[Golden]:
    """Every output, by folder."""
    yield from _of_bundled()
    for model in WORKED_OUT:
        source, schedule = f"transformers.models.{model}.modeling_{model}", kept_schedule(model)
        yield Golden(model, "tensor_parallel", source, schedule, ())
        yield Golden(model, "fused", source, schedule, ("fuse=true",))
        if model != "albert":  # one layer, called twelve times
            settings = ("pipeline_stages=2", "pipeline_engine=torch")
            yield Golden(model, "pipeline_torch", source, schedule, settings)


def kept_schedule(model: str) -> str:
    """Where a schedule lies that was worked out, from the root of the repository."""
    return f"generated/{model}/schedule.py"


def _of_bundled() -> Iterator[Golden]:
    """Those of a bundled schedule, or of our own model's."""
    sources = {"gpt": ("tests/models/gpt.py", "tests/models/gpt_schedule.py")}
    for name in ("bert", "gpt2", "llama", "t5"):
        sources[name] = (f"transformers.models.{name}.modeling_{name}", name)
    for model, (source, schedule) in sorted(sources.items()):
        yield Golden(model, "tensor_parallel", source, schedule, ())
        yield Golden(model, "tensor_parallel_checkpointed", source, schedule, ("ckpt_ratio=0.5",))
        yield Golden(model, "fused", source, schedule, ("fuse=true",))
        if model in SEQUENCE_PARALLEL:
            settings = ("sequence_parallel=true",)
            yield Golden(model, "sequence_parallel", source, schedule, settings)
        if model in ("bert", "gpt"):
            yield Golden(model, "whole_logits", source, schedule, ("parallel_loss=false",))
        if model in PIPELINE:
            yield Golden(model, "pipeline", source, schedule, ("pipeline_stages=2",))
        if model == "llama":
            settings = ("pipeline_stages=2", "pipeline_engine=torch")
            yield Golden(model, "pipeline_torch", source, schedule, settings)


@dataclass(frozen=True)
class Readability:
    """How much of a model file a reader knows already.

    Attributes:
        lines: Lines of the original.
        kept: Lines of the original that stand in the output.
        hunks: Places that changed, other than by an import made absolute.
        added: Lines that are new, other than such imports.
        imports: Lines of imports that were made absolute.
        helpers: Lines of the files beside the model file.
    """

    lines: int
    kept: int
    hunks: int
    added: int
    imports: int
    helpers: int

    @property
    def kept_percent(self) -> float:
        """Share of the original's lines that stand in the output."""
        return 100 * self.kept / self.lines


def readability(golden: Golden, output: Output) -> Readability:
    """Compares an output with its original, and with the original whose imports are absolute."""
    with contextlib.chdir(ROOT):
        file = SourceFile.read(*locate(golden.source))
    original = file.text.splitlines()
    moved = apply_edits(file.text, absolute_imports(file))[0].splitlines()
    after = output.files[output.model_file].splitlines()
    kept = difflib.SequenceMatcher(None, original, after, autojunk=False).get_matching_blocks()
    opcodes = difflib.SequenceMatcher(None, moved, after, autojunk=False).get_opcodes()
    changes = [code for code in opcodes if code[0] != "equal"]
    return Readability(
        lines=len(original),
        kept=sum(block.size for block in kept),
        hunks=len(changes),
        added=sum(end - start for *_, start, end in changes),
        imports=sum(a != b for a, b in zip(original, moved, strict=True)),
        helpers=sum(
            len(text.splitlines())
            for name, text in output.files.items()
            if name.endswith(".py") and name not in (output.model_file, "__init__.py")
        ),
    )


def table(rows: Mapping[Golden, Readability]) -> str:
    """The text of `generated/README.md`."""
    lines = [f"| {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * (len(COLUMNS) - 1)]
    for golden, row in rows.items():
        cells = (row.lines, f"{row.kept_percent:.1f}%", row.imports, row.hunks, row.added)
        link = f"[`{golden.folder}`]({golden.folder}/rewrite.diff)"
        lines.append(f"| {link} | {' | '.join(map(str, cells))} | {row.helpers} |")
    return HEAD + "\n".join(lines) + TAIL


def everything(by: Callable[..., Output] = rewrite) -> dict[str, str]:
    """Every file of `generated/`, model files that git ignores among them, by its path there."""
    files: dict[str, str] = {}
    rows: dict[Golden, Readability] = {}
    for golden in goldens():
        output = golden.make(by)
        rows[golden] = readability(golden, output)
        files |= {f"{golden.folder}/{name}": text for name, text in output.files.items()}
    kept = map(kept_schedule, WORKED_OUT)
    files |= {n.removeprefix("generated/"): (ROOT / n).read_text("utf-8") for n in kept}
    return {TABLE: table(rows), **files}


def present() -> set[str]:
    """The files that lie in `generated/`, what Python leaves behind apart."""
    return {
        path.relative_to(GENERATED).as_posix()
        for path in GENERATED.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def main() -> None:
    """Writes what is not current, and removes what no schedule gives any more."""
    files = everything()
    for name in sorted(present() - files.keys()):
        (GENERATED / name).unlink()
        print(f"removed generated/{name}")
    for name, text in files.items():
        path = GENERATED / name
        if not path.is_file() or path.read_bytes() != text.encode():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
            print(f"wrote generated/{name}")
    for folder in sorted(GENERATED.rglob("*"), reverse=True):
        if folder.is_dir() and not os.listdir(folder):
            folder.rmdir()


if __name__ == "__main__":
    main()
