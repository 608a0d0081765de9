"""Small models of four families, with schedules of the bundled ones' knobs."""

from pathlib import Path

from slapo_rewrite.bundle import rules_folder

MODELS = {
    "bert": "BertForMaskedLM(BertConfig(vocab_size=2000, hidden_size=128, num_hidden_layers=6, "
    "num_attention_heads=4, intermediate_size=512, max_position_embeddings=256))",
    "gpt2": "GPT2LMHeadModel(GPT2Config(vocab_size=2000, n_embd=128, n_layer=6, n_head=4, "
    "n_positions=256))",
    "llama": "LlamaForCausalLM(LlamaConfig(vocab_size=2000, hidden_size=128, num_hidden_layers=6, "
    "intermediate_size=352, num_attention_heads=4, num_key_value_heads=2))",
    "t5": "T5ForConditionalGeneration(T5Config(vocab_size=2000, d_model=128, d_kv=32, d_ff=256, "
    "num_layers=4, num_decoder_layers=4, num_heads=4, decoder_start_token_id=0))",
}


def source_of(name: str) -> str:
    """The module of a family."""
    return f"transformers.models.{name}.modeling_{name}"


def written_schedule(name: str, folder: Path) -> str:
    """The bundled schedule of a family, of a small model."""
    text = (rules_folder() / "schedules" / f"{name}.py").read_text()
    text += f"\n\ndef model(m):\n    return m.{MODELS[name]}\n"
    if name == "t5":  # what the bundled one says of its small model fits this one
        text = text.replace("def verify_model", "def other_model")
    path = folder / f"{name}_small.py"
    path.write_text(text)
    return str(path)
