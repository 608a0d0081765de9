"""transformers' own tests of models, run on rewritten files."""
