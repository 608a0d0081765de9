"""Plans a training run: chooses parallelism and knobs, and predicts time and memory."""
