"""Renders a review as one self-contained HTML page, without network or scripts."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from slapo_rewrite import __version__
from slapo_rewrite.review.gathered import Review, duration, number, size
from slapo_rewrite.simulate.pipeline import Step

LIGHT, DARK = "friendly", "github-dark"  # Pygments' styles
TOKEN = "t-"  # the prefix of the CSS classes of tokens
# The colour of text and lines in plots, which is finally replaced by the page's own colour.
_INK = "#010203"
# A palette for colour-blind readers (Okabe and Ito 2008), on white and on black.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
_STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), _INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), _INK),
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
EVENTS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "transfer": ("activation", "gradient"),
    "optimizer": ("optimizer",),
}


def review_page(review: Review) -> str:
    """The review as HTML."""
    here = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(here),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "lines": highlighted,
        "number": number,
        "size": size,
        "duration": duration,
        "code": with_code,
        "anchor": anchor,
    }
    style = (here / "page.css").read_text(encoding="utf-8")
    return environment.get_template("page.html").render(
        review=review,
        recorded=review.recorded,
        content=review.recorded.content,
        version=__version__,
        style=Markup(style + token_style()),
        plots=drawn(review),
    )


def highlighted(text: str) -> list[Markup]:
    """The lines of a Python file, with highlighted tokens."""
    lexer = PythonLexer(stripnl=False, ensurenl=False)
    marked = highlight(text, lexer, HtmlFormatter(nowrap=True, classprefix=TOKEN))
    return [Markup(line) for line in marked.split("\n")]


def token_style() -> str:
    """The CSS of tokens, for light and dark pages."""

    def rules(style: str) -> str:
        text = HtmlFormatter(style=style, classprefix=TOKEN).get_style_defs(".code")
        return "\n".join(line for line in text.splitlines() if line.startswith(f".code .{TOKEN}"))

    return f"{rules(LIGHT)}\n@media (prefers-color-scheme: dark) {{\n{rules(DARK)}\n}}\n"


def with_code(words: str) -> Markup:
    """Turns text between backticks into code elements."""
    parts = re.split(r"`([^`]+)`", words)
    marked = (Markup("<code>{}</code>").format(p) if i % 2 else p for i, p in enumerate(parts))
    return Markup().join(marked)


def anchor(name: str) -> str:
    """A name in a form that an element's id may contain."""
    return re.sub(r"[^\w.-]", "-", name)


def drawn(review: Review) -> dict[str, Markup]:
    """The plots of a prediction."""
    prediction = review.prediction
    if prediction is None:
        return {}
    names = [model.name for model in prediction.models]
    memory = [{k: v / 1e9 for k, v in model.memory.items()} for model in prediction.models]
    seconds = [{k: model.seconds[k] * 1e3 for k in prediction.spent} for model in prediction.models]
    found = {
        "memory": bars(names, memory, "GB", "memory"),
        "time": bars(names, seconds, "ms", "time"),
    }
    if prediction.stages is not None and prediction.stages.timeline is not None:
        found["stages"] = timeline(prediction.stages.timeline)
    return {name: Markup(svg) for name, svg in found.items()}


def bars(names: Sequence[str], amounts: Sequence[Mapping[str, float]], unit: str, name: str) -> str:
    """A stacked bar for each name."""
    with plt.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure, axes = plt.subplots(figsize=(7.2, 0.9 + 0.42 * len(names)), layout="constrained")
        left = [0.0] * len(names)
        kinds = list(amounts[0])
        for kind, colour in zip(kinds, COLOURS[: len(kinds)], strict=True):
            widths = [each[kind] for each in amounts]
            axes.barh(names, widths, left=left, label=kind, color=colour, height=0.62)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for place, total in enumerate(left):
            axes.text(total, place, f" {total:.3g} {unit}", va="center")
        axes.invert_yaxis()
        axes.set_xlim(0, max(left) * 1.14)
        axes.set_xlabel(unit)
        figure.legend(loc="outside upper center", ncols=len(kinds), frameon=False)
        return _svg(figure, name)


def timeline(step: Step) -> str:
    """A row for each stage with its work over time."""
    with plt.rc_context({**_STYLE, "svg.hashsalt": "stages"}):
        count = len(step.stages)
        figure, axes = plt.subplots(figsize=(7.2, 1.0 + 0.45 * count), layout="constrained")
        colours = dict(zip(EVENTS, COLOURS, strict=False))
        for number, stage in enumerate(step.stages):
            for kind, events in EVENTS.items():
                spans = [
                    (1e3 * e.start, 1e3 * (e.end - e.start))
                    for e in stage.events
                    if e.what in events
                ]
                if spans:
                    axes.broken_barh(
                        spans, (number - 0.36, 0.72), color=colours[kind], edgecolor="white", lw=0.3
                    )
        axes.set_yticks(range(count), [f"stage {number}" for number in range(count)])
        axes.invert_yaxis()
        axes.set_xlim(0, 1e3 * step.seconds)
        axes.set_xlabel("ms")
        handles = [Patch(color=colour, label=kind) for kind, colour in colours.items()]
        figure.legend(
            handles=handles, loc="outside upper center", ncols=len(handles), frameon=False
        )
        return _svg(figure, "stages")


def _svg(figure: Figure, name: str) -> str:
    """A figure as an SVG element, without the header of a file.

    The ids of its elements get its name as a prefix, since those of all plots would be equal.
    """
    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    plt.close(figure)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", svg)
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt" ', "", svg, count=1)
