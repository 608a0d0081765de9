"""Small models that represent large ones."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from slapo_rewrite.model import small_model
from slapo_rewrite.model.small_config import VOCABULARY, small_config

HEADS = [
    "BertForMaskedLM",
    "BertForPreTraining",
    "RobertaForMaskedLM",
    "AlbertForMaskedLM",
    "GPT2LMHeadModel",
    "GPTNeoForCausalLM",
    "GPTNeoXForCausalLM",
    "OPTForCausalLM",
    "LlamaForCausalLM",
    "LlamaForSequenceClassification",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "Phi3ForCausalLM",
    "FalconForCausalLM",
    "T5ForConditionalGeneration",
    "BartForConditionalGeneration",
]


def scheduled(name, **config):
    cls = getattr(transformers, name)
    return SimpleNamespace(model=lambda m: cls(cls.config_class(**config)))


@pytest.mark.long
@pytest.mark.parametrize("name", HEADS)
def test_twins_of_hugging_face_models_run(name):
    schedule = scheduled(name)
    model = small_model.build_small(schedule, None).train()
    inputs = small_model.step_inputs(schedule, model)
    loss = small_model.loss_of(schedule, model(**inputs), inputs)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None for p in model.parameters())
    assert 10_000 < sum(p.numel() for p in model.parameters()) < 2_000_000
    config = model.config
    assert config.vocab_size == VOCABULARY
    assert config.num_hidden_layers == 2
    assert config.num_attention_heads % 4 == 0
    assert config.hidden_size % config.num_attention_heads == 0
    assert all(m.p == 0 for m in model.modules() if isinstance(m, nn.Dropout))
    padded = inputs["attention_mask"][1] == 0
    assert padded.sum() == 4
    if inputs["labels"].dim() == 2:
        assert (inputs["labels"][1][padded] == -100).all()
    again = small_model.step_inputs(schedule, model)
    assert all(torch.equal(again[key], inputs[key]) for key in inputs)


def test_grouped_heads_stay_grouped():
    config = small_config(transformers.MistralConfig())
    assert (config.num_attention_heads, config.num_key_value_heads) == (16, 4)
    few = transformers.LlamaConfig(num_attention_heads=16, num_key_value_heads=2)
    small = small_config(few)
    assert (small.num_attention_heads, small.num_key_value_heads) == (8, 2)
    one = transformers.LlamaConfig(num_attention_heads=32, num_key_value_heads=1)
    small = small_config(one)
    assert (small.num_attention_heads, small.num_key_value_heads) == (4, 1)


def test_heads_that_are_not_as_wide_as_the_model_stay_so():
    small = small_config(transformers.Gemma2Config())
    assert small.head_dim * small.num_attention_heads != small.hidden_size


def test_parts_of_rotary_frequencies_add_up_to_a_small_head():
    config = transformers.Qwen2VLConfig().text_config
    given = {None: [2, 2, 4], (22, 22, 20): [2, 2, 4], (16, 24, 24): [4, 2, 2]}
    for sections, small in given.items():  # height and width have as many
        if sections is not None:
            config.rope_parameters["mrope_section"] = [*sections]
        assert small_config(config).rope_parameters["mrope_section"] == small


def test_layers_without_heads_are_small():
    small = small_model.small_config(transformers.MambaConfig())
    assert (small.hidden_size, small.intermediate_size) == (64, 128)


def test_widths_that_are_given_for_every_layer_are_small():
    small = small_config(transformers.Gemma3nTextConfig())
    assert set(small.intermediate_size) == {4 * small.hidden_size}
    assert len(small.intermediate_size) == small.num_hidden_layers


def test_a_vocabulary_without_what_pads_it_is_small():
    config = transformers.LlamaConfig(vocab_size=201024, unpadded_vocab_size=200058)
    config.type_vocab_size = 2
    small = small_config(config)
    assert small.vocab_size == small.unpadded_vocab_size == VOCABULARY
    assert small.type_vocab_size == 2


def test_what_masks_of_speech_are_made_of_stays():
    for config in (transformers.Wav2Vec2Config(), transformers.Data2VecAudioConfig()):
        small = small_config(config)  # data2vec's has no such attribute of its own
        assert small.mask_time_prob == config.mask_time_prob > 0
        assert small.apply_spec_augment is False


def test_windows_that_are_given_for_every_layer_are_small():
    small = small_config(transformers.LongformerConfig(attention_window=[512] * 12))
    assert small.attention_window == [8, 8]


def test_layers_that_are_numbered_are_kept_with_others():
    config = transformers.Qwen2MoeConfig(mlp_only_layers=[0, 1])
    small = small_config(config)
    assert (small.mlp_only_layers, small.num_hidden_layers) == ([0], 2)
    deep = small_config(config, kept={config.num_hidden_layers: [1, 5, 6]})
    assert (deep.mlp_only_layers, deep.num_hidden_layers) == ([0], 3)


def test_every_kind_of_layer_is_kept():
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = transformers.Gemma2Config(num_hidden_layers=12, layer_types=kinds * 2)
    small = small_config(config)
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert config.num_hidden_layers == 12  # a copy was made smaller
    neo = small_config(transformers.GPTNeoConfig())
    assert neo.attention_layers == ["global", "local"]
    assert neo.attention_types == [[["global", "local"], 1]]


def test_special_tokens_stay_in_the_vocabulary_and_apart():
    config = transformers.LlamaConfig(bos_token_id=1, eos_token_id=[31998, 2], pad_token_id=31999)
    small = small_config(config)
    assert small.bos_token_id == 1
    assert small.eos_token_id == [202 - (small.pad_token_id == 202), 2]
    assert small.pad_token_id in (201, 202)


def test_schedule_has_the_last_word():
    linear = nn.Linear(2, 2)
    schedule = SimpleNamespace(
        verify_model=lambda m: linear,
        inputs=lambda model: {"input": torch.rand(1, 2)},
        loss=lambda outputs: outputs.sum(),
    )
    assert small_model.build_small(schedule, None) is linear
    first, second = (small_model.step_inputs(schedule, linear, seed=s)["input"] for s in (3, 3))
    assert torch.equal(first, second)
    assert small_model.loss_of(schedule, torch.ones(2), {}) == 2


def test_that_a_model_is_its_own_twin_is_found_out_once():
    built = []
    schedule = SimpleNamespace(model=lambda m: built.append(nn.Linear(3, 3)) or built[-1])
    build = small_model.small_builder(schedule, None)
    twins = [build() for _ in range(3)]
    assert built[1:] == twins and built[0].weight.is_meta


def test_homegrown_model_is_its_own_twin():
    schedule = SimpleNamespace(model=lambda m: nn.Linear(3, 3))
    assert small_model.build_small(schedule, None).weight.device.type == "cpu"
    with pytest.raises(ValueError, match=r"define inputs\(model\)"):
        small_model.step_inputs(schedule, nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"returns no loss but \[2, 3\].*define loss\(outputs\)"):
        small_model.loss_of(schedule, torch.ones(2, 3), {})
    with pytest.raises(TypeError, match="`model` returns int"):
        small_model.build_small(SimpleNamespace(model=lambda m: 3), None)
    large = SimpleNamespace(model=lambda m: nn.Linear(20_000, 20_000))
    with pytest.raises(ValueError, match=r"400,020,000 parameters.*define verify_model"):
        small_model.build_small(large, None)


def test_a_deep_twin_is_the_schedules_own_with_all_layers():
    """It may know sizes that hang together; one that says no layers gives way to a made one."""

    def made(depth):
        sizes = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 30}
        config = transformers.BertConfig(vocab_size=50, num_hidden_layers=depth, **sizes)
        return transformers.BertForMaskedLM(config)

    schedule = scheduled("BertForMaskedLM", num_hidden_layers=4)
    with torch.device("meta"):
        full = schedule.model(None)
    for own, kept, depth, is_own in (
        (lambda m: made(4), None, 4, True),
        (lambda m: made(2), None, 4, True),
        (lambda m: made(2), {4: (0, 1, 3)}, 3, True),
        (lambda m: nn.Linear(2, 2), None, 4, False),
    ):
        schedule.verify_model = own
        model = small_model.build_deep(schedule, None, full, kept)
        assert len(model.bert.encoder.layer) == depth
        assert (model.config.hidden_size == 24) is is_own


def test_a_deep_twin_that_is_too_large_gives_way_to_one_of_few_layers(monkeypatch):
    """Inkling's layers double in width; all of them take more memory than there is."""
    schedule = scheduled("BertForMaskedLM", num_hidden_layers=40)
    with torch.device("meta"):
        full = schedule.model(None)
    assert len(small_model.build_deep(schedule, None, full).bert.encoder.layer) == 40
    monkeypatch.setattr(small_model, "LARGEST_TWIN", 1_000_000)
    assert len(small_model.build_deep(schedule, None, full).bert.encoder.layer) == 2


def test_a_deep_twin_has_the_kinds_of_the_layers_and_nothing_else_of_the_full_model():
    def made(depth, text):
        kinds = {"layer_types": ["full_attention", "sliding_attention"] * (depth // 2)}
        text = transformers.Gemma3TextConfig(num_hidden_layers=depth, **kinds, **text)
        vision = transformers.SiglipVisionConfig(num_hidden_layers=depth, image_size=16)
        config = transformers.Gemma3Config(text_config=text, vision_config=vision)
        return transformers.Gemma3ForConditionalGeneration(config)

    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 16}
    small = {**sizes, "vocab_size": 90, "num_key_value_heads": 1}
    schedule = SimpleNamespace(model=lambda m: made(6, {}), verify_model=lambda m: made(2, small))
    with torch.device("meta"):
        full = schedule.model(None)
        model = small_model.build_deep(schedule, None, full)
        few = small_model.build_deep(schedule, None, full, {6: (0, 3)})
    text, vision = model.config.text_config, model.config.vision_config
    assert text.layer_types == full.config.text_config.layer_types
    assert (text.hidden_size, vision.image_size, vision.num_hidden_layers) == (32, 16, 6)
    assert few.config.text_config.layer_types == ["full_attention", "sliding_attention"]


def test_twins_with_state_spaces_scan_in_short_chunks():
    config = small_config(transformers.FalconH1Config())
    assert config.mamba_chunk_size < small_model.TOKENS


def test_tokens_that_stand_for_images_stay_words_of_the_text():
    """Of a text in another part of the configuration; no text that is made up has them."""
    small = small_config(transformers.Gemma3Config())
    words = small.text_config.vocab_size
    moved = [small.image_token_index, small.boi_token_index, small.eoi_token_index]
    assert words == VOCABULARY and max(moved) < 3 and len({*moved}) == 2
    beyond = small_config(transformers.LlavaConfig())  # of 32,000 words, as many as the text has
    assert beyond.image_token_index == 32_000
