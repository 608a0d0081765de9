"""modeling_llama.py, tensor parallel; rewrite.diff shows what changed."""
