"""A review as one page of HTML, which needs nothing beside it: no network, no script."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from slapo_rewrite import __version__
from slapo_rewrite.review import plots
from slapo_rewrite.review.gathered import Review, duration, number, size

LIGHT, DARK = "friendly", "github-dark"  # Pygments' styles
TOKEN = "t-"  # begins the classes of tokens, which the page has names of its own beside


def review_page(review: Review) -> str:
    """The page."""
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
    """The lines of a Python file, its tokens marked."""
    lexer = PythonLexer(stripnl=False, ensurenl=False)
    marked = highlight(text, lexer, HtmlFormatter(nowrap=True, classprefix=TOKEN))
    return [Markup(line) for line in marked.split("\n")]


def token_style() -> str:
    """Colours of tokens, on a light page and on a dark one."""

    def rules(style: str) -> str:
        text = HtmlFormatter(style=style, classprefix=TOKEN).get_style_defs(".code")
        return "\n".join(line for line in text.splitlines() if line.startswith(f".code .{TOKEN}"))

    return f"{rules(LIGHT)}\n@media (prefers-color-scheme: dark) {{\n{rules(DARK)}\n}}\n"


def with_code(words: str) -> Markup:
    """Words whose code stands between backticks."""
    parts = re.split(r"`([^`]+)`", words)
    marked = (Markup("<code>{}</code>").format(p) if i % 2 else p for i, p in enumerate(parts))
    return Markup().join(marked)


def anchor(name: str) -> str:
    """A name as part of an element's id."""
    return re.sub(r"[^\w.-]", "-", name)


def drawn(review: Review) -> dict[str, Markup]:
    """The plots of a prediction."""
    prediction = review.prediction
    if prediction is None:
        return {}
    names = [model.name for model in prediction.models]
    memory = [{k: v / 1e9 for k, v in model.memory.items()} for model in prediction.models]
    seconds = [{k: v * 1e3 for k, v in model.seconds.items()} for model in prediction.models]
    found = {
        "memory": plots.bars(names, memory, "GB", "memory"),
        "time": plots.bars(names, seconds, "ms", "time"),
    }
    if prediction.stages is not None and prediction.stages.timeline is not None:
        found["stages"] = plots.timeline(prediction.stages.timeline)
    return {name: Markup(svg) for name, svg in found.items()}
