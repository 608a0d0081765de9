"""transformers' tests of any model, for the model of a schedule; `python -m tests.library` runs it.

It is collected in a package that holds transformers' `tests`. The environment says what is tested:
`SOURCE` is a modeling module of transformers, `SCHEDULE` the schedule, and `OUTPUT` a folder with
the rewritten module, which takes the original's place. Without it the original is tested.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import sys
import unittest
from pathlib import Path
from typing import Any

import torch

SOURCE, OUTPUT = os.environ["SOURCE"], os.environ["OUTPUT"]
if OUTPUT:  # before anything imports the original, which tests find classes of heads in
    sys.path.insert(0, str(Path(OUTPUT).parent))
    name = f"{Path(OUTPUT).name}.{SOURCE.rpartition('.')[2]}"
    sys.modules[SOURCE] = importlib.import_module(name)

from transformers import PreTrainedModel  # noqa: E402

from slapo_rewrite.model.small_model import drawing, training_inputs  # noqa: E402
from slapo_rewrite.schedule.load import ScheduleFile  # noqa: E402

from .test_modeling_common import ModelTesterMixin  # noqa: E402

MODULE = importlib.import_module(SOURCE)
SCHEDULE = ScheduleFile.load(os.environ["SCHEDULE"]).module
with drawing(0):
    MODEL = getattr(SCHEDULE, "verify_model", SCHEDULE.model)(MODULE)
    GIVEN = training_inputs(SCHEDULE, MODEL, whole=True)
INPUTS = {name: value for name, value in GIVEN.items() if "label" not in name}


def takes_inputs(cls: Any) -> bool:
    """Whether a class is a model of the schedule's configuration that takes the same inputs."""
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        return False
    # The tests make no labels for what trains two heads at once.
    if cls.__name__.endswith(("PreTrainedModel", "ForPreTraining")):
        return False
    parameters = inspect.signature(cls.forward).parameters
    return isinstance(MODEL.config, cls.config_class or ()) and INPUTS.keys() <= {*parameters}


class Tester:
    """What the tests ask of a model: a configuration, inputs, and some of its sizes."""

    is_training, num_choices = True, 4

    def __init__(self) -> None:
        """Sizes are those of the text model where there are several."""
        main = next(value for value in INPUTS.values() if torch.is_tensor(value))
        self.batch_size, self.seq_length = main.shape[0], main.shape[1]
        self.encoder_seq_length = self.decoder_seq_length = self.seq_length

    def __getattr__(self, name: str) -> Any:
        return getattr(MODEL.config.get_text_config(), name)

    def get_config(self) -> Any:
        """The configuration."""
        return copy.deepcopy(MODEL.config)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        """The configuration and inputs without labels."""
        return self.get_config(), copy.deepcopy(INPUTS)

    def prepare_config_and_inputs_for_model_class(self, _: type) -> tuple[Any, dict[str, Any]]:
        """The same for every class."""
        return self.prepare_config_and_inputs_for_common()


class ModelTest(ModelTesterMixin, unittest.TestCase):
    """Every test of the installed transformers that needs nothing but a model."""

    all_model_classes = tuple(filter(takes_inputs, map(MODULE.__dict__.get, MODULE.__all__)))

    def setUp(self) -> None:
        """Before each test."""
        self.model_tester = Tester()
