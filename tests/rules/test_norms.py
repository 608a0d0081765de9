"""Norms and what comes before them: what the source reads like, and how many places there are."""

from __future__ import annotations

from slapo_rewrite.fusion.registry import rules
from tests.rewriting import rewritten


def test_blank_lines_go_with_the_statements_between_them(tmp_path):
    (example,) = (e for e in rules()["rms_norm"].examples if "convert into" in e.source)
    output = rewritten(tmp_path, example.source, example.schedule)
    (name,) = (name for name in output.files if name.startswith("source_"))
    assert output.files[name].endswith("""\
    def forward(self, hidden_states):
        # Only scales, and does not shift.

        # convert into half-precision if necessary
        return rms_norm(hidden_states, self.weight, self.eps, cast="weight")
""")
