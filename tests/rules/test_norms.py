"""Norms and what comes before them: what the source reads like, and how many places there are."""

from __future__ import annotations

from slapo_rewrite.rules.fusions import rms_norm

from tests.rewriting import rewritten


def test_blank_lines_go_with_the_statements_between_them(tmp_path):
    output = rewritten(tmp_path, rms_norm.T5, rms_norm.SCHEDULE)
    (name,) = (name for name in output.files if name.startswith("source_"))
    assert output.files[name].endswith("""\
    def forward(self, hidden_states):
        # Only scales, and does not shift.

        # convert into half-precision if necessary
        return rms_norm(hidden_states, self.weight, self.eps, cast="weight")
""")
