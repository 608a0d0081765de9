"""What each command takes on its command line; what it does then is the command line's.

Nothing here imports what costs seconds: help and completion are printed at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from slapo_rewrite import __version__, errors
from slapo_rewrite.bundle import rules_folder

BERT = "transformers.models.bert.modeling_bert --schedule bert"  # for examples
EXIT_CODES = """\
exit codes:
  0  done
  1  the answer is no: --check, verify, or a merge that leaves conflicts
  2  the input is wrong
  3  a defect of slapo-rewrite"""


class Parser(argparse.ArgumentParser):
    """Reports what is wrong as the tool reports everything else.

    Args:
        command: The command's name behind the program's.
        description: What it does.
        example: What one types to call it.
        more: Further words for its help.
    """

    def __init__(self, command: str, description: str, example: str, *more: str) -> None:
        super().__init__(
            prog=f"slapo-rewrite {command}".strip(),
            description=description,
            epilog="\n\n".join([f"example:\n  {example}", *more, EXIT_CODES]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Raises it: what a command line lacks is a mistake as others are."""
        hint = f"{self.prog} --help"
        if message.endswith("required: --schedule/-s"):
            hint = "give --schedule FILE, one that ships with the tool, or auto: " + hint
        raise errors.UsageError(message, hint=hint)


def _rewrite() -> Parser:
    parser = Parser(
        "",
        "Rewrite a PyTorch model file as a schedule says.",
        f"slapo-rewrite {BERT} --set ckpt_ratio=0.5 -o out",
        "other commands (each has a --help of its own):\n  "
        + "\n  ".join(f"slapo-rewrite {name}" for name in PARSERS if name),
    )
    parser.add_argument("source", metavar="SOURCE", help="a Python file or an importable module")
    parser.add_argument(
        "--schedule",
        "-s",
        required=True,
        metavar="S",
        help="a file, the name of a bundled one, or auto: worked out from the model (auto:CLASS, "
        "or auto:FILE.py with model(m), inputs(model) and loss(outputs))",
    )
    parser.add_argument(
        "--write-schedule",
        type=Path,
        metavar="FILE",
        help="where `--schedule auto` writes what it works out (default: OUT_schedule.py)",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="OUT", help="the output folder")
    parser.add_argument(
        "--set", action="append", default=[], metavar="K=V", help="set a knob (repeatable)"
    )
    parser.add_argument(
        "--diff",
        action="store_true",
        help="print the unified diff, write nothing; it is kept in ~/.cache/slapo-rewrite for the "
        "next time, but with SLAPO_REWRITE_CACHE=0",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit 1 if OUT is not current, write nothing"
    )
    parser.add_argument(
        "--verify", action="store_true", help="run original against rewritten afterwards"
    )
    _add_worlds(parser)
    parser.add_argument(
        "--single-file", action="store_true", help="one module instead of a package"
    )
    parser.add_argument(
        "--support",
        type=Path,
        metavar="DIR",
        help="a folder beside OUT for its helpers, which several outputs share",
    )
    parser.add_argument(
        "--with",
        dest="further",
        action="append",
        default=[],
        metavar="NAME",
        help="add a further helper: load_pretrained, save_pretrained, build_deferred, "
        "add_adapters, sharded_state (repeatable)",
    )
    parser.add_argument("--merge", action="store_true", help="carry hand edits in OUT over")
    parser.add_argument("--force", action="store_true", help="overwrite hand edits in OUT")
    parser.add_argument("--version", action="version", version=f"slapo-rewrite {__version__}")
    _add_json(parser, "what --check found, or what was written")
    return parser


def _verify() -> Parser:
    parser = Parser(
        "verify",
        "Run original against rewritten in real processes and compare their numbers.",
        "slapo-rewrite verify out --world 2",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="an output folder")
    _add_worlds(parser)
    _add_inputs(parser)
    _add_json(parser, "the checks")
    return parser


def _explain() -> Parser:
    parser = Parser(
        "explain",
        "Say which line of the schedule caused a line of the output, and why.",
        "slapo-rewrite explain out modeling_bert.py:120",
        "the whole of it, to be reviewed:\n  slapo-rewrite explain out --html report.html\n"
        "  slapo-rewrite explain out --markdown",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="an output folder")
    parser.add_argument(
        "place", metavar="FILE:LINE", nargs="?", help="one line; without it, every change"
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page for review: diff, module tree, rules, verification, prediction",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print it in short, for a pull request's comment"
    )
    parser.add_argument(
        "--world", type=int, metavar="N", help="ranks that these tell the sizes on (default: 2)"
    )
    _add_inputs(parser)
    _add_json(parser, "the changes")
    return parser


def _update() -> Parser:
    parser = Parser(
        "update",
        "Rewrite an output with the source, schedule and knobs that its record names; say which of "
        "them\nhas changed, and show what is new. Hand edits stay.",
        "slapo-rewrite update out",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="an output folder")
    parser.add_argument(
        "--check", action="store_true", help="exit 1 if OUT is not current, write nothing"
    )
    parser.add_argument("--force", action="store_true", help="overwrite hand edits in OUT")
    _add_inputs(parser)
    _add_json(parser, "what was done")
    return parser


def _tree() -> Parser:
    parser = Parser(
        "tree",
        "Print the module tree: path, class, parameters, construction site.",
        f"slapo-rewrite tree {BERT}",
    )
    parser.add_argument("source", metavar="SOURCE", help="a Python file or an importable module")
    parser.add_argument(
        "--schedule", "-s", required=True, metavar="S", help="a file, or the name of a bundled one"
    )
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
        "Search the knobs' space for the highest throughput, by running your training command.",
        "slapo-rewrite tune gpt.py --schedule s.py -o tuned "
        "--run 'torchrun --nproc-per-node 2 train.py {out} --batch {batch_size}'",
        "the schedule says what knobs may be (`from slapo_rewrite import Choices, Range`):\n"
        "  def schedule(s, ckpt_ratio: Annotated[float, Choices(0.0, 0.5, 1.0)] = 0.5): ...\n"
        "and, in a function that is optional, knobs of the run, and which points may be tried:\n"
        "  def space(knobs, batch_size: Annotated[int, Range(8, 64, 8)] = 8):\n"
        "      return knobs.batch_size * (1 - knobs.ckpt_ratio) <= 32",
        "in the command, {out} is the folder of the rewritten model, {NAME} a knob's value; it "
        "prints\na line of JSON, and more is better:\n"
        '  {"throughput": 123.4}\n'
        "what runs out of memory, or of time, counts as slower than everything else; what fails "
        "otherwise\nends the search. The same command goes on where it ended.",
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        nargs="?",
        help="a Python file or an importable module; or the schedule, if it says SOURCE = ...",
    )
    parser.add_argument(
        "--schedule", "-s", metavar="S", help="a file, or the name of a bundled one"
    )
    parser.add_argument("--run", metavar="COMMAND", help="trains for a while, for the shell")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("tuned"),
        metavar="FOLDER",
        help="for trials.jsonl, the rewritten models, logs and surface.png (default: tuned)",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="K=V", help="fix a knob (repeatable)"
    )
    parser.add_argument(
        "--strategy",
        action="append",
        metavar="NAME",
        help="model: what a model of the trials so far expects most of (default); slapo: the "
        "largest batch by bisection, then the ratio; random; exhaustive",
    )
    parser.add_argument(
        "--trials", type=int, metavar="N", help="no more than N, those in the record among them"
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="for each run")
    parser.add_argument(
        "--confidence",
        type=float,
        default=0.9,
        metavar="P",
        help="end when with this probability nothing is more than 1%% better (default: 0.9)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of random numbers")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="GRID",
        help="instead of running: how many trials the strategies need on measured throughputs, "
        'a JSON file {"batch_size": [...], "ckpt_ratio": [...], "throughput": [[...], ...]}',
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="how often to replay (default: 20)")
    return parser


def _plan() -> Parser:
    parser = Parser(
        "plan",
        "Predict the best ways to train a model on so many GPUs: time and memory, no GPU needed.",
        "slapo-rewrite plan transformers.models.llama.modeling_llama --schedule llama "
        "--gpus 64 --gpu h100 --batch 256 --sequence 4096",
        "what is varied: tensor and data parallelism, micro-batches, the stage of ZeRO, and the "
        "knobs\n`sequence_parallel`, `pipeline_stages`, `ckpt_ratio` and `fuse`, as far as the "
        "schedule has them.",
    )
    parser.add_argument("source", metavar="SOURCE", help="a Python file or an importable module")
    parser.add_argument(
        "--schedule", "-s", required=True, metavar="S",
        help="a file, the name of a bundled one, or auto",
    )  # fmt: skip
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="how many there are")
    parser.add_argument(
        "--gpu", default="h100", metavar="NAME",
        help="what they are: v100, a100, h100 (default), h200, b200; or measure: this machine's",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, required=True, metavar="B", help="rows of a step")
    parser.add_argument(
        "--sequence", type=int, metavar="L",
        help="tokens of a row (default: what the schedule's inputs give)",
    )  # fmt: skip
    parser.add_argument(
        "--memory", metavar="SIZE", help="what a rank may hold, 70GiB say (default: all)"
    )
    parser.add_argument(
        "--nodes-of", type=int, default=8, metavar="N", help="GPUs of a node (default: 8)"
    )
    parser.add_argument(
        "--precision", choices=("bf16", "fp16", "fp32"), help="default: bf16, on v100 fp16"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="K=V", help="fix a knob (repeatable)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="OUT",
        help="a folder for the rewritten model, deepspeed.json, launch.sh and plan.json",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw time against memory (.png, .svg)"
    )
    return parser


def _add_worlds(parser: argparse.ArgumentParser) -> None:
    """What to verify: the whole model, or its pipeline."""
    parser.add_argument(
        "--world",
        type=int,
        nargs="+",
        metavar="N",
        help="world sizes to verify the whole model at (default: 1 2)",
    )
    for name, what in (
        ("--pp", "stages of the pipeline to verify (default: all that there are)"),
        ("--tp", "ranks that share a stage's layers (default: 1)"),
        ("--dp", "replicas of the pipeline (default: 1)"),
    ):
        parser.add_argument(name, type=int, metavar="N", help=what)


def _add_json(parser: Parser, what: str) -> None:
    """An answer for programs."""
    parser.add_argument(
        "--json",
        action="store_true",
        help=f"print {what} as one JSON object, with the exit code and its reason",
    )


def _add_inputs(parser: Parser) -> None:
    """Where the original and the schedule of an output are."""
    parser.add_argument(
        "--source", metavar="SOURCE", help="the original, if it is not where it was"
    )
    parser.add_argument("--schedule", metavar="S", help="the schedule, if it is not where it was")


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
    """Answers a shell that wants to know what may stand at a place of the command line.

    It is asked by argcomplete's protocol: the line is in `COMP_LINE`, and `_ARGCOMPLETE` says how
    many of its words are the program.
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
