"""The argument parsers of all commands.

Nothing here has slow imports, so that help and completion are printed at once.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from slapo_rewrite import __version__, errors
from slapo_rewrite.bundle import rules_folder

BERT = "transformers.models.bert.modeling_bert --schedule bert"  # for examples
EXIT_CODES = """\
exit codes:
  0  done
  1  the answer is no: --check, verify, or a merge that leaves conflicts
  2  the input is wrong
  3  a defect of slapo-rewrite"""


class _AtLeast(argparse.Action):
    """Stores one or several numbers with a lower bound."""

    def __init__(self, *names: Any, least: int, **more: Any) -> None:
        super().__init__(*names, **more)
        self.least = least

    def __call__(self, parser: Any, options: Any, given: Any, name: str | None = None) -> None:
        """Raises `UsageError` for a number below the bound."""
        if min(given if isinstance(given, list) else [given]) < self.least:
            raise errors.UsageError(f"{self.option_strings[-1]} is at least {self.least}")
        setattr(options, self.dest, given)


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in the tool's own form.

    Args:
        command: The command's name after the program's.
        description: What it does.
        example: An example of a call.
        more: Further paragraphs of its help.
    """

    def __init__(self, command: str, description: str, example: str, *more: str) -> None:
        super().__init__(
            prog=f"slapo-rewrite {command}".strip(),
            description=description,
            epilog="\n\n".join([f"example:\n  {example}", *more, EXIT_CODES]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Raises the message as a `UsageError`, with a hint."""
        hint = f"{self.prog} --help"
        if message.endswith("required: --schedule/-s"):
            hint = "give --schedule FILE, a bundled schedule, or auto: " + hint
        raise errors.UsageError(message, hint=hint)

    def flag(self, name: str, words: str) -> None:
        """Adds an option without a value."""
        self.add_argument(name, action="store_true", help=words)

    def option(self, name: str, value: str, words: str, **more: Any) -> None:
        """Adds an option with a value; several names are separated by commas."""
        self.add_argument(*name.split(", "), metavar=value, help=words, **more)

    def path(self, name: str, value: str, words: str, **more: Any) -> None:
        """Adds an option whose value is a path."""
        self.option(name, value, words, type=Path, **more)

    def number(self, name: str, words: str, value: str = "N", least: int = 1, **more: Any) -> None:
        """Adds an option whose value is an integer with a lower bound."""
        self.option(name, value, words, type=int, action=_AtLeast, least=least, **more)

    def several(self, name: str, value: str, words: str, **more: Any) -> None:
        """Adds an option that may be repeated."""
        self.option(name, value, words, action="append", **more)

    def source(self, words: str = "a Python file or an importable module", **more: Any) -> None:
        """Adds the argument for the source."""
        self.add_argument("source", metavar="SOURCE", help=words, **more)

    def out(self) -> None:
        """Adds the argument for an existing output."""
        self.add_argument("out", metavar="OUT", type=Path, help="an output folder")


def _rewrite() -> Parser:
    parser = Parser(
        "",
        "Apply a schedule to the source file of a PyTorch model.",
        f"slapo-rewrite {BERT} --set ckpt_ratio=0.5 -o out",
        "other commands (each has its own --help):\n" + _others(),
    )
    parser.source()
    parser.option(
        "--schedule, -s",
        "S",
        "a schedule file, the name of a bundled schedule, or auto: derived from the model "
        "(auto:CLASS selects a class; auto:FILE.py has model(m), inputs(model), loss(outputs))",
        required=True,
    )
    parser.path(
        "--write-schedule",
        "FILE",
        "where `--schedule auto` writes the schedule (default: OUT_schedule.py)",
    )
    parser.path("-o, --output", "OUT", "the output folder")
    parser.several("--set", "K=V", "set a knob (repeatable)", default=[])
    parser.flag(
        "--diff",
        "print the unified diff, do not write OUT; the diff is cached in ~/.cache/slapo-rewrite "
        "unless SLAPO_REWRITE_CACHE=0",
    )
    parser.flag("--check", "exit with 1 if OUT is not current, write nothing")
    parser.flag("--verify", "compare the output with the original afterwards")
    _add_worlds(parser)
    parser.flag("--single-file", "write one module instead of a package")
    parser.path("--support", "DIR", "a folder beside OUT for helpers that several outputs share")
    parser.several(
        "--with",
        "NAME",
        "add an optional helper: load_pretrained, save_pretrained, build_deferred, "
        "add_adapters, sharded_state (repeatable)",
        dest="further",
        default=[],
    )
    parser.flag("--merge", "keep hand edits in OUT, by a three-way merge")
    parser.flag("--force", "overwrite hand edits in OUT")
    parser.add_argument("--version", action="version", version=f"slapo-rewrite {__version__}")
    _add_json(parser, "what --check found, or what was written")
    return parser


def _others() -> str:
    """The other commands with their descriptions."""
    words = {name: str(make().description) for name, make in PARSERS.items() if name}
    return "\n".join(
        f"  slapo-rewrite {name:<10}  {re.split('[.;:]', does)[0]}" for name, does in words.items()
    )


def _verify() -> Parser:
    parser = Parser(
        "verify",
        "Run the original and the rewritten model in real processes and compare their numbers.",
        "slapo-rewrite verify out --world 2",
    )
    parser.out()
    _add_worlds(parser)
    _add_inputs(parser)
    _add_json(parser, "the checks")
    return parser


def _explain() -> Parser:
    parser = Parser(
        "explain",
        "Print which line of the schedule caused a line of the output, and why.",
        "slapo-rewrite explain out modeling_bert.py:120",
        "all changes, for review:\n  slapo-rewrite explain out --html report.html\n"
        "  slapo-rewrite explain out --markdown",
    )
    parser.out()
    parser.add_argument(
        "place", metavar="FILE:LINE", nargs="?", help="one line (default: every change)"
    )
    parser.path(
        "--html",
        "FILE",
        "write a page for review: diff, module tree, rules, verification, predictions",
    )
    parser.flag("--markdown", "print a short form, for a comment on a pull request")
    parser.number("--world", "number of ranks for the sizes in --html and --markdown (default: 2)")
    _add_inputs(parser)
    _add_json(parser, "the changes")
    return parser


def _update() -> Parser:
    parser = Parser(
        "update",
        "Rewrite an output with the source, schedule and knobs in its record.\n"
        "Print which of them changed and what is new. Hand edits stay.",
        "slapo-rewrite update out",
    )
    parser.out()
    parser.flag("--check", "exit with 1 if OUT is not current, write nothing")
    parser.flag("--force", "overwrite hand edits in OUT")
    _add_inputs(parser)
    _add_json(parser, "what was done")
    return parser


def _tree() -> Parser:
    parser = Parser(
        "tree",
        "Print the module tree: path, class, parameters, construction site.",
        f"slapo-rewrite tree {BERT}",
    )
    parser.source()
    parser.option("--schedule, -s", "S", "a file, or the name of a bundled one", required=True)
    _add_json(parser, "the modules")
    return parser


def _primitives() -> Parser:
    parser = Parser(
        "primitives",
        "List the primitives, or show one with its worked example.",
        "slapo-rewrite primitives shard",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="a primitive")
    return parser


def _tune() -> Parser:
    parser = Parser(
        "tune",
        "Search for the knobs' values with the highest throughput, by running your command.",
        "slapo-rewrite tune gpt.py --schedule s.py -o tuned "
        "--run 'torchrun --nproc-per-node 2 train.py {out} --batch {batch_size}'",
        "the schedule lists the values of knobs (`from slapo_rewrite import Choices, Range`):\n"
        "  def schedule(s, ckpt_ratio: Annotated[float, Choices(0.0, 0.5, 1.0)] = 0.5): ...\n"
        "an optional function adds knobs of the run, and says which points may be tried:\n"
        "  def space(knobs, batch_size: Annotated[int, Range(8, 64, 8)] = 8):\n"
        "      return knobs.batch_size * (1 - knobs.ckpt_ratio) <= 32",
        "in the command, {out} is the folder of the rewritten model, and {NAME} a knob's value. "
        "It\nprints a line of JSON; a larger number is better:\n"
        '  {"throughput": 123.4}\n'
        "a run that is out of memory, or out of time, counts as slower than all others. Any other "
        "failure\nends the search. The same command continues a search.",
    )
    parser.source(
        "a Python file or an importable module; or the schedule, if it has SOURCE = ...", nargs="?"
    )
    parser.option("--schedule, -s", "S", "a file, or the name of a bundled one")
    parser.option("--run", "COMMAND", "a shell command that trains for a while")
    parser.path(
        "-o, --output",
        "FOLDER",
        "the folder for trials.jsonl, rewritten models, logs and surface.png (default: tuned)",
        default=Path("tuned"),
    )
    parser.several("--set", "K=V", "fix a knob (repeatable)", default=[])
    parser.several(
        "--strategy",
        "NAME",
        "how to choose the next trial. model: by a statistical model of the trials so far "
        "(default); slapo: the largest batch by bisection, then the ratio; random; exhaustive",
    )
    parser.number("--trials", "at most N trials, including those in the record")
    parser.option("--timeout", "SECONDS", "time limit for each run", type=float)
    parser.option(
        "--confidence",
        "P",
        "end if no point is more than 1%% better, with this probability (default: 0.9)",
        type=float,
        default=0.9,
    )
    parser.number("--seed", "seed of random numbers", least=0, default=0)
    _add_json(parser, "the result")
    parser.path(
        "--replay",
        "GRID",
        "do not run: print how many trials the strategies need on measured throughputs, "
        'a JSON file {"batch_size": [...], "ckpt_ratio": [...], "throughput": [[...], ...]}',
    )
    parser.number("--seeds", "how often to replay (default: 20)")
    return parser


def _plan() -> Parser:
    parser = Parser(
        "plan",
        "Predict the best ways to train a model on N GPUs: time and memory. No GPU is needed.",
        "slapo-rewrite plan transformers.models.llama.modeling_llama --schedule llama "
        "--gpus 64 --gpu h100 --batch 256 --sequence 4096",
        "it varies tensor and data parallelism, micro-batches and the stage of ZeRO; also the "
        "knobs\n`sequence_parallel`, `pipeline_stages`, `ckpt_ratio` and `fuse`, if the "
        "schedule has them.",
    )
    parser.source()
    parser.option(
        "--schedule, -s", "S", "a file, the name of a bundled one, or auto", required=True
    )
    parser.number("--gpus", "number of GPUs", required=True)
    parser.option(
        "--gpu",
        "NAME",
        "kind of GPU: v100, a100, h100 (default), h200, b200; measure: this machine's GPU; or "
        "your own table, FILE.toml",
        default="h100",
    )
    parser.number("--batch", "rows in a step", "B", required=True)
    parser.number("--sequence", "tokens in a row (default: as in the schedule's inputs)", "L")
    parser.option("--memory", "SIZE", "memory limit of a rank, such as 70GiB (default: all)")
    parser.number("--nodes-of", "GPUs in a node (default: 8)", default=8)
    parser.add_argument(
        "--precision", choices=("bf16", "fp16", "fp32", "tf32"), help="default: bf16, on v100 fp16"
    )
    parser.several("--set", "K=V", "fix a knob (repeatable)", default=[])
    parser.path(
        "-o, --output",
        "OUT",
        "a folder for the rewritten model, deepspeed.json, launch.sh and plan.json",
    )
    _add_json(parser, "the plan")
    parser.path("--plot", "FILE", "plot time against memory (.png, .svg)")
    return parser


def _add_worlds(parser: Parser) -> None:
    """Adds the options what to verify: the whole model, or its pipeline."""
    parser.number("--world", "world sizes to verify the whole model at (default: 1 2)", nargs="+")
    for name, what in (
        ("--pp", "stages of the pipeline to verify (default: all)"),
        ("--tp", "ranks that share a stage's layers (default: 1)"),
        ("--dp", "replicas of the pipeline (default: 1)"),
    ):
        parser.number(name, what)


def _add_json(parser: Parser, what: str) -> None:
    """Adds `--json`."""
    parser.flag("--json", f"print {what} as one JSON object, with the exit code and its reason")


def _add_inputs(parser: Parser) -> None:
    """Adds the options for the original and the schedule of an output."""
    parser.option("--source", "SOURCE", "the original, if it was moved")
    parser.option("--schedule", "S", "the schedule, if it was moved")


PARSERS: dict[str, Callable[[], Parser]] = {
    "": _rewrite,
    "explain": _explain,
    "tree": _tree,
    "update": _update,
    "verify": _verify,
    "primitives": _primitives,
    "plan": _plan,
    "tune": _tune,
}


def complete() -> None:
    """Completes a command line for the shell.

    This is argcomplete's protocol: the line is in `COMP_LINE`, and `_ARGCOMPLETE` is the number of
    its words that are the program.
    """
    import argcomplete
    from argcomplete.completers import DirectoriesCompleter, FilesCompleter

    words = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split(" ")
    name = words[1] if len(words) > 2 and words[1] in PARSERS else ""
    if name:
        os.environ["_ARGCOMPLETE"] = "2"
    files = FilesCompleter()

    def source(prefix: str, **_: object) -> list[str]:
        return [*filter(None, PARSERS), *files(prefix)] if not name else list(files(prefix))

    def schedule(prefix: str, **_: object) -> list[str]:
        bundled = (rules_folder() / "schedules").glob("[!_]*.py")
        return ["auto", *(path.stem for path in bundled), *files(prefix)]

    def primitive(**_: object) -> list[str]:
        from slapo_rewrite.primitives import registry
        from slapo_rewrite.primitives.page import rules

        return [*registry(), *rules()]

    parser = PARSERS[name]()
    known = {"source": source, "schedule": schedule, "name": primitive}
    for action in parser._actions:
        folder = DirectoriesCompleter() if action.dest in ("out", "output", "support") else files
        action.completer = known.get(action.dest, folder)  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options=False)
