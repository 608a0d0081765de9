"""The table of Slapo's behaviours names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ROW = re.compile(r"\]\((\S+\.py)\): `(test_\w+)`")


def test_every_test_that_is_named_exists():
    named = ROW.findall((HERE / "README.md").read_text())
    assert len(named) > 20
    missing = [(f, t) for f, t in named if f"def {t}(" not in (HERE / f).read_text()]
    assert not missing
