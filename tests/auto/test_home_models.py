"""Models that people write themselves: what `--schedule auto` splits, and that numbers match."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from slapo_rewrite.auto.derive import Derived, derive
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.verify.run import chosen, verify
from tests.auto.test_derive import STAGES, shards
from tests.marks import long

MODELS = Path(__file__).parents[1] / "models"
# Several steps may be of one model.
SOURCES = {
    "audio_pairs": "audio_pairs.py",
    "einsum_lm": "einsum_lm.py",
    "looped_blocks": "looped_blocks.py",
    "packed_by_group": "packed_qkv.py",
    "packed_by_head": "packed_qkv.py",
    "state_space": "state_space.py",
    "torch_layers": "torch_layers.py",
}


@functools.cache
def derived(name: str) -> Derived:
    return derive(str(MODELS / SOURCES[name]), str(MODELS / "steps" / f"{name}.py"))


def verified(name: str, folder: Path, settings: list[str], worlds: tuple[list[int], int, int]):
    """Whether the output of what was worked out, with some knobs, equals the original."""
    source, file, out = str(MODELS / SOURCES[name]), folder / "s.py", folder / "out"
    file.write_text(derived(name).text)
    write(out, rewrite(source, str(file), settings).files)
    sizes, stages, tensor = worlds
    layout = chosen(out, None, stages, tensor) if stages else chosen(out, sizes)
    found = verify(out, layout, source=source, schedule=str(file))
    assert found.ok, found.render()


@pytest.mark.parametrize(
    ("name", "split"),
    [
        long(
            "audio_pairs",
            {
                '*.0.{query,key,value} ["weight", "bias"], axis=0',
                '*.0.out "weight", axis=1',
            },
        ),
        (
            "packed_by_group",
            {'*.attention.qkv ["weight", "bias"], axis=0', '*.attention.proj "weight", axis=1'},
        ),
        (
            "state_space",
            {
                '*.mixer.enter "weight", axis=0, parts=2',
                '*.mixer.{step,conv} ["weight", "bias"], axis=0',
                '*.mixer ["log_decay", "skip"], axis=0',
                '*.mixer.{select,leave} "weight", axis=1',
            },
        ),
    ],
)
def test_what_is_split(name, split):
    assert split <= shards(derived(name).text)


def test_lists_of_lists_are_checkpointed_by_their_parts_and_sequences_as_lists():
    assert 'layers[:ckpt_ratio]["{0,1}"].checkpoint()' in derived("audio_pairs").text
    assert "layers[:ckpt_ratio].checkpoint()" in derived("packed_by_group").text


PARTS = ["ckpt_ratio=0.5", "fuse=true"]


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "settings", "worlds"),
    [
        ("audio_pairs", PARTS, ([2], 0, 0)),
        ("audio_pairs", [*STAGES, "ckpt_ratio=0.5"], ([], 2, 2)),
        ("einsum_lm", PARTS, ([2], 0, 0)),
        ("looped_blocks", ["fuse=true"], ([2], 0, 0)),
        ("state_space", ["ckpt_ratio=0.5"], ([2, 4], 0, 0)),
        ("packed_by_group", PARTS, ([2], 0, 0)),
        ("packed_by_head", PARTS, ([2], 0, 0)),
        ("torch_layers", ["fuse=true"], ([2], 0, 0)),
    ],
)
def test_the_numbers_are_the_original_ones(name, settings, worlds, tmp_path):
    verified(name, tmp_path, settings, worlds)


FOUND_BY_NAME = """

class MLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))
"""


def test_what_the_last_check_names_alone_stays_whole(tmp_path, monkeypatch):
    """A class that is looked up in the original's module is not the output's."""
    text = (MODELS / "packed_qkv.py").read_text()
    made = "nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))"
    assert made in text
    text = text.replace(made, 'classes.named("MLP")(dim)') + FOUND_BY_NAME
    text = text.replace(
        "import torch\n", "import torch\nfrom looked_up_classes import classes\n", 1
    )
    named = "import sys\n\n\ndef named(name):\n"
    named += "    return getattr(sys.modules['looked_up_classes.net'], name)\n"
    (tmp_path / "looked_up_classes").mkdir()
    for name, content in {"__init__": "", "classes": named, "net": text}.items():
        (tmp_path / "looked_up_classes" / f"{name}.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    text = derive("looked_up_classes.net", str(MODELS / "steps" / "packed_by_group.py")).text
    assert '*.attention.qkv ["weight", "bias"], axis=0' in shards(text)
    said = " ".join(text.replace("#", "").split())
    assert "Left whole: `blocks.*.mlp.{up,down}`: `blocks.0.mlp` is a `MLP`, which changes" in said


@pytest.mark.long
@pytest.mark.processes
def test_copies_of_one_are_split_alike(tmp_path):
    source, file = str(MODELS / "deep_copies.py"), str(MODELS / "deep_copies_schedule.py")
    write(tmp_path / "out", rewrite(source, file, ["fuse=true"]).files)
    found = verify(tmp_path / "out", chosen(tmp_path / "out", [2]), source=source, schedule=file)
    assert found.ok, found.render()


CAPTIONER = str(MODELS / "encoder_decoder" / "model.py")
CAPTIONER_SCHEDULE = str(MODELS / "encoder_decoder_schedule.py")


def test_an_import_from_a_copy_leaves_out_what_is_used_no_more():
    files = rewrite(CAPTIONER, CAPTIONER_SCHEDULE).files
    assert "from .layers import Attention, TensorParallelSwiGLU\n" in files["encoder.py"]
    # The decoder's blocks are whole, and made of the same two classes.
    assert "from .layers import Attention, SwiGLU\n" in files["model.py"]


@pytest.mark.long
@pytest.mark.processes
def test_several_files_in_a_package(tmp_path):
    write(tmp_path, rewrite(CAPTIONER, CAPTIONER_SCHEDULE).files)
    found = verify(tmp_path, [1, 2], source=CAPTIONER, schedule=CAPTIONER_SCHEDULE)
    assert found.ok, found.render()
