"""Analysis of Python source, independent of models, and the one transform that changes it."""
