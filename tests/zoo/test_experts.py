"""Mixtures of experts, whose routing the static check follows without values."""

from __future__ import annotations

import pytest

from slapo_rewrite import errors
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.verify.run import verify

MIXTRAL = "transformers.models.mixtral.modeling_mixtral"

SCHEDULE = """\
from transformers import MixtralConfig


def model(m):
    return m.MixtralForCausalLM(MixtralConfig(num_hidden_layers=2))


def verify_model(m):
    return m.MixtralForCausalLM(
        MixtralConfig(
            vocab_size=203,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            num_local_experts=4,
            max_position_embeddings=64,
        )
    )


def schedule(s, entered: str = "mlp"):
    layers = s["model.layers"]
    columns = layers["*.self_attn.{q_proj,k_proj,v_proj}"]
    columns.shard("weight", axis=0)
    columns.sync("bwd_post", "all_reduce")
    layers["*.self_attn.o_proj"].shard("weight", axis=1)
    layers["*.self_attn.o_proj"].sync("fwd_post", "all_reduce")
    layers["*.mlp.experts"].shard("gate_up_proj", axis=1, parts=2)
    layers["*.mlp.experts"].shard("down_proj", axis=2)
    layers[f"*.{entered}"].sync("bwd_post", "all_reduce")
    layers["*.mlp"].sync("fwd_post", "all_reduce")
"""


def test_the_routing_weights_get_summands_of_their_gradient(tmp_path):
    """They scale what each rank's part of the experts gives, beside the experts' first argument."""
    path = tmp_path / "s.py"
    path.write_text(SCHEDULE)
    with pytest.raises(errors.UnfollowableSize) as caught:
        rewrite(MIXTRAL, str(path), ["entered=mlp.experts"])
    words = caught.value.render()
    assert "gradient is a summand on each rank, and nothing adds it up" in words
    assert "self.experts(hidden_states, top_k_index, top_k_weights)" in words


@pytest.mark.processes
def test_mixtral(tmp_path):
    path = tmp_path / "s.py"
    path.write_text(SCHEDULE)
    output = rewrite(MIXTRAL, str(path))
    assert not output.warnings
    diff = output.diff(0)
    assert '+        shard_parameter(self, "gate_up_proj", axis=1, parts=2)' in diff
    assert "F.linear(hidden_states, all_reduce_gradient(self.weight))" in diff
    write(tmp_path / "out", output.files)
    report = verify(tmp_path / "out", [2, 4])
    assert report.ok, report.render()
