# Written by slapo-rewrite 0.2.0 for gpt.py; rewrite.json says from what.
"""DeepSpeed's checkpoints of a model's stages, and the original's state dict."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from .loading import shards, under_original_names
from .shards import world_of
from .stages import load_held


def layer_files(
    folder: str | Path, tag: str | None, count: int
) -> list[Sequence[Path]]:
    """The files of each stage in a checkpoint, one for each tensor-parallel rank.

    Args:
        folder: The folder of the checkpoints.
        tag: The checkpoint's tag; without it, the latest checkpoint.
        count: How many stages there are.

    Raises:
        ValueError: The checkpoint has another number of stages.
    """
    folder = Path(folder)
    folder /= tag or (folder / "latest").read_text().strip()
    by_layer: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("layer_*-*model_states.pt")):
        by_layer.setdefault(file.name.partition("-")[0], []).append(file)
    if len(by_layer) != count:
        raise ValueError(
            f"{folder} is a checkpoint of {len(by_layer)} stages, not {count}"
        )
    return list(by_layer.values())


def read_layer(file: Path, model: nn.Module) -> dict[str, Tensor]:
    """One rank's tensors of a stage, memory-mapped.

    Args:
        file: The file.
        model: The model as built on that rank.

    Raises:
        ValueError: A tensor has another size in the model.
    """
    named: dict[str, Tensor] = torch.load(
        file, map_location="cpu", mmap=True, weights_only=True
    )
    own = model.state_dict()
    for name, tensor in named.items():
        if name in own and own[name].shape != tensor.shape:
            raise ValueError(
                f"{name} is {list(tensor.shape)} in {file} and {list(own[name].shape)} "
                "in the model"
            )
    return named


def joined(
    files: Sequence[Sequence[Path]], make: Callable[[], nn.Module]
) -> dict[str, Tensor]:
    """The original's state dict, from the files of a model's stages.

    Args:
        files: The files of each stage, one for each tensor-parallel rank.
        make: Makes the model.

    Raises:
        ValueError: The model has other weights.
    """
    full: dict[str, Tensor] = {}
    models = []
    for rank in range(len(files[0])):
        with torch.device("meta"), world_of(len(files[0]), rank):
            models.append(make())
    divided = shards(models[0])
    with world_of(len(models)):
        for of_stage in files:
            parts = [read_layer(*each) for each in zip(of_stage, models, strict=True)]
            for name in parts[0].keys() - full.keys():
                if name in divided:
                    full[name] = divided[name].joined([part[name] for part in parts])
                else:
                    full[name] = parts[0][name].clone()
        return under_original_names(models[0], in_order(models[0], full))


def in_order(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sorts tensors in the order of the model's state dict.

    Raises:
        ValueError: The names are not those of the model.
    """
    names = model.state_dict().keys()
    if names != named.keys():
        raise ValueError(
            f"only the model has {sorted(names - named.keys())}, and only the "
            f"checkpoint {sorted(named.keys() - names)}"
        )
    return {name: named[name] for name in names}


def write_layers(
    folder: str | Path,
    full: Mapping[str, Tensor],
    stages: Iterable[Callable[[], nn.Module]],
    rank: int = 0,
) -> None:
    """Writes the files that one tensor-parallel rank loads.

    Args:
        folder: The folder of the checkpoints.
        full: The original's state dict.
        stages: Functions that make the stages.
        rank: The tensor-parallel rank.

    Raises:
        FileExistsError: The folder has such a checkpoint already.
    """
    tag = "weights"
    target = Path(folder) / tag
    target.mkdir(parents=True, exist_ok=rank > 0)
    for number, make in enumerate(stages):
        with torch.device("meta"):
            stage = make()
        load_held(stage, full, assign=True)
        part = {n: t.detach().clone() for n, t in stage.state_dict().items()}
        file = f"layer_{number:02}-model_{rank:02}-model_states.pt"
        torch.save(part, target / file)
    engine = {"module": None, "dp_world_size": 1}  # required by DeepSpeed
    torch.save(engine, target / "mp_rank_00_model_states.pt")
    (target.parent / "latest").write_text(tag)
