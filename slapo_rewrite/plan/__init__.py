"""Plans a training run: which parallelism, which knobs, how much time and memory they take."""
