"""The contents of the comment for a pull request."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slapo_rewrite import cli
from slapo_rewrite.emit import record
from slapo_rewrite.review import review_comment
from tests.review.test_html_page import NET, SCHEDULE


@pytest.fixture(autouse=True)
def _output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET.replace("return x\n", "return x  # `x` | x\n"))
    head, signature, calls = SCHEDULE.partition("def schedule(s, ratio: float = 0.5):\n")
    Path("s.py").write_text(head + signature + "    s.apply_all()\n" + calls)
    assert cli.main(["net.py", "--schedule", "s.py", "-o", "out"]) == 0


def comment(capsys, *options: str) -> str:
    capsys.readouterr()
    assert cli.main(["explain", "out", "--markdown", *options]) == 0
    return capsys.readouterr().out


def section(text: str, title: str) -> str:
    (found,) = re.findall(
        rf"<details><summary>({title}.*?)</summary>\n\n(.*?)\n\n</details>", text, re.S
    )
    return found[1]


def rows(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|")]
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert {len(row) for row in cells} == {len(cells[0])}
    return [cells[0], *cells[2:]]


def test_five_lines_come_first(capsys):
    lines = comment(capsys).splitlines()
    assert lines[0] == "### `out`, rewritten by slapo-rewrite"
    assert [line[:2] for line in lines[2:7]] == ["1.", "2.", "3.", "4.", "5."]
    assert lines[6] == "5. Not verified: run slapo-rewrite verify out."


def test_each_change_names_its_line_of_the_schedule(capsys):
    table = rows(section(comment(capsys), "What changed because of what"))
    assert table[0] == ["where", "what", "because of"]
    why = {row[1]: row[2] for row in table[1:]}
    assert why["`up` becomes a ColumnParallelLinear"].startswith(
        's.py:20 `s["layers.*.up"].shard(["weight", "bias"], axis=0)`'
    )
    assert not any("import" in what for what in why)


def test_the_diff_is_there_where_it_is_not_too_long(capsys, monkeypatch):
    shown = section(comment(capsys), "The diff")
    assert shown == f"```diff\n{Path('out/rewrite.diff').read_text().rstrip(chr(10))}\n```"
    monkeypatch.setattr(review_comment, "MOST_OF_DIFF", 10)
    assert re.fullmatch(
        r"It has \d+ lines: see `out/rewrite.diff`.", section(comment(capsys), "The diff")
    )


def test_rules_and_figures_are_tables(capsys):
    text = comment(capsys)
    rules = {row[0]: row[1:] for row in rows(section(text, "Rules: 0 fired, "))[1:]}
    assert rules["`swiglu`"][0] == "did not fire" and "matches nothing" in rules["`swiglu`"][1]
    figures = rows(section(text, "Predicted for a GPU"))
    assert figures[0][1:] == ["the original", "rewritten, in one process", "rewritten, a rank of 2"]
    assert {"weights", "**memory**", "**step**"} <= {row[0] for row in figures}


def test_what_is_not_equal_is_named(capsys):
    path = Path("out") / record.NAME
    check = {"world": 2, "check": "gradients", "ok": False, "error": 1.0, "limit": 0.001}
    found = {"worlds": [2], "changed": [], "checks": [check], "failures": []}
    path.write_text(record.with_verification(path.read_text(), {**found, "verdict": "not equal"}))
    text = comment(capsys)
    assert "5. Verified at world 2: NOT EQUAL in 1 of 1 comparisons." in text
    assert section(text, "What is not equal") == "- gradients at world 2 by 1.0, of at most 0.001"
    path.write_text(
        record.with_verification(path.read_text(), {**found, "verdict": "equal", "failures": []})
    )
    assert "What is not equal" not in comment(capsys)


def test_what_changed_since_is_noted(capsys):
    Path("net.py").write_text(NET)
    Path("out/net.py").write_text(Path("out/net.py").read_text() + "# mine\n")
    text = comment(capsys)
    assert "\n> Since it was written: the source net.py has changed.\n" in text
    assert "\n> `net.py` was edited by hand.\n" in text
    assert "3. Sizes: not known, because the source net.py has changed" in text


def test_backticks_and_bars_do_not_end_anything(capsys):
    path = Path("out") / record.NAME
    content = json.loads(path.read_text())
    for directive in content["directives"]:
        directive["text"] = 's["a|b"].find("`c`")'
    path.write_text(record.dumped(content))
    table = rows(section(comment(capsys), "What changed because of what"))
    assert '``s["a\\|b"].find("`c`")``' in table[1][2]


def test_both_forms_at_once(capsys):
    text = comment(capsys, "--html", "report.html")
    assert text.startswith("###") and "wrote" not in text
    assert Path("report.html").is_file()
