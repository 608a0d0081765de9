"""Configurations and inputs that are made up for transformers' models, so that a step runs."""

from __future__ import annotations

import importlib

import pytest

from slapo_rewrite.auto.hugging_face_model import IN_TEXT, steps_of
from slapo_rewrite.auto.step import first_that_runs

# By what each needs: what the default leaves open, a layer that comes late, as many heads of a
# state space as its width asks for, a width that six numbers of a box share, sections of a head,
# no cache, the rotated share of a head, what a backbone gives out, a width that follows another
# part's, as many blocks as layers, a past that lags reach into, windows as small as the image,
# pairs of images, speech under a name that text has elsewhere, patches that say where they are,
# what was found in an image, what was done so far, all labels, several tokens at a time.
NEEDING = {
    "ministral.MinistralForCausalLM": "MinistralConfig(head_dim=128)",
    "nemotron.NemotronForCausalLM": "NemotronConfig(num_key_value_heads=48)",
    "deepseek_v2.DeepseekV2ForCausalLM": "DeepseekV2Config(num_experts_per_tok=2)",
    "lfm2_moe.Lfm2MoeForCausalLM": "Lfm2MoeConfig(layer_types=['full_attention', ",
    "esm.EsmForSequenceClassification": "EsmConfig(vocab_size=1000)",
    "hunyuan_vl.HunYuanVLForConditionalGeneration": "HunYuanVLTextConfig(head_dim=128)",
    "jamba.JambaForCausalLM": "JambaConfig()",
    "mamba2.Mamba2ForCausalLM": "Mamba2Config()",
    "zamba2.Zamba2ForCausalLM": "Zamba2Config()",
    "lilt.LiltForTokenClassification": "LiltConfig()",
    "layoutlmv3.LayoutLMv3ForSequenceClassification": "LayoutLMv3Config()",
    "glm4v_moe.Glm4vMoeForConditionalGeneration": "Glm4vMoeConfig()",
    "canine.CanineForSequenceClassification": "CanineConfig()",
    "gemma4_unified.Gemma4UnifiedForConditionalGeneration": "Gemma4UnifiedConfig()",
    "dots1.Dots1ForCausalLM": "n_routed_experts=8",
    "xmod.XmodForMaskedLM": "default_language='en_XX'",
    "granitemoehybrid.GraniteMoeHybridForCausalLM": "GraniteMoeHybridConfig(use_cache=False)",
    "mistral4.Mistral4ForCausalLM": "Mistral4Config()",
    "ernie4_5_vl_moe.Ernie4_5_VLMoeForConditionalGeneration": "Ernie4_5_VLMoeConfig()",
    "zoedepth.ZoeDepthForDepthEstimation": "ZoeDepthConfig()",
    "depth_anything.DepthAnythingForDepthEstimation": "DepthAnythingConfig()",
    "eomt.EomtForUniversalSegmentation": "EomtConfig()",
    "informer.InformerForPrediction": "prediction_length=8",
    "timesfm2_5.TimesFm2_5ModelForPrediction": "TimesFm2_5Config()",
    "sam.SamVisionModel": "SamVisionConfig()",
    "lightglue.LightGlueForKeypointMatching": "LightGlueConfig()",
    "idefics.IdeficsModel": "IdeficsConfig()",
    "speech_encoder_decoder.SpeechEncoderDecoderModel": "SpeechEncoderDecoderConfig()",
    "pix2struct.Pix2StructForConditionalGeneration": "Pix2StructConfig()",
    "lxmert.LxmertForPreTraining": "LxmertConfig()",
    "decision_transformer.DecisionTransformerModel": "DecisionTransformerConfig()",
    "fastspeech2_conformer.FastSpeech2ConformerModel": "FastSpeech2ConformerConfig()",
    "musicgen.MusicgenForCausalLM": "MusicgenDecoderConfig()",
}


@pytest.mark.parametrize("name", NEEDING)
def test_a_step_of_a_small_model_runs(name):
    family, _, head = name.partition(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    step, why = first_that_runs(steps_of(getattr(module, head)), module)
    assert step is not None, why
    assert NEEDING[name] in step.model
    is_default = NEEDING[name].endswith("Config()")
    assert step.title.endswith("in its default configuration") is is_default


@pytest.mark.parametrize(
    ("head", "labels"),
    [
        ("SequenceClassification", {"labels": "torch.randint(model.config.num_labels, (2,))"}),
        ("TokenClassification", {"labels": "torch.randint(model.config.num_labels, (2, 16))"}),
        ("QuestionAnswering", dict.fromkeys(("start_positions", "end_positions"), IN_TEXT)),
    ],
)
def test_labels_that_are_no_tokens_are_written(head, labels):
    module = importlib.import_module("transformers.models.bert.modeling_bert")
    step, _ = first_that_runs(steps_of(getattr(module, f"BertFor{head}")), module)
    assert step is not None and step.loss is None
    tokens = {"input_ids": "torch.randint(3, model.config.vocab_size, (2, 16))"}
    assert step.inputs == {**tokens, **labels}


def test_a_small_model_has_a_layer_of_each_kind():
    """Which of them are mixtures follows from how many there are."""
    name = "transformers.models.switch_transformers.modeling_switch_transformers"
    module = importlib.import_module(name)
    step = next(steps_of(module.SwitchTransformersForConditionalGeneration))
    assert "num_layers=6, num_decoder_layers=6" in str(step.twin)


def test_what_a_configuration_leaves_open_is_said():
    module = importlib.import_module("transformers.models.nemotron.modeling_nemotron")
    step, _ = first_that_runs(steps_of(module.NemotronForCausalLM), module)
    title = "NemotronForCausalLM in its default configuration, with `num_key_value_heads`"
    assert step is not None and step.title == title
