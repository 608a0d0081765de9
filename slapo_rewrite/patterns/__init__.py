"""Pattern matching: finds computations in a model's `forward`. Does not import torch."""
