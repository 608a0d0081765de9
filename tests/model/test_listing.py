"""What `slapo-rewrite tree` prints."""

import sys
from pathlib import Path

import transformers

from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.model.join import Sources
from slapo_rewrite.model.listing import render_tree
from slapo_rewrite.model.tree import Tree, build_model


def listing(name: str, **settings: object) -> list[str]:
    cls = getattr(transformers, name)
    module = sys.modules[cls.__module__]
    tree = Tree(build_model(lambda _: cls(cls.config_class(**settings)), module))
    file = SourceFile.read(Path(module.__file__), module.__name__)
    return render_tree(tree, Sources(file)).splitlines()


def row(lines: list[str], path: str) -> list[str]:
    return next(line.split(maxsplit=1) for line in lines if line.split()[:1] == [path])


def test_a_row_says_class_parameters_and_line():
    lines = listing("BertForMaskedLM", num_hidden_layers=12)
    text = row(lines, "bert.encoder.layer.[0-11].attention.self.query")[1]
    cls, rest = text.split(maxsplit=1)
    parameters, place = rest.rsplit(maxsplit=1)
    assert (cls, parameters.strip()) == ("Linear", "weight [768, 768], bias [768]")
    name, line = place.split(":")
    source = Path(sys.modules["transformers.models.bert.modeling_bert"].__file__)
    assert name == source.name
    assert "self.query = nn.Linear(" in source.read_text().splitlines()[int(line) - 1]


def test_alike_elements_share_a_row_and_others_do_not():
    lines = listing("T5ForConditionalGeneration", num_layers=4, num_decoder_layers=1)
    paths = [line.split()[0] for line in lines if line]
    assert "encoder.block.0" in paths
    assert "encoder.block.[1-3]" in paths
    assert "decoder.block.0" in paths
    assert not any(p.startswith("decoder.block.[") for p in paths)


def test_a_large_model_is_as_long_as_a_small_one():
    small = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 9, "num_attention_heads": 1}
    few = listing("LlamaForCausalLM", num_hidden_layers=2, **small)
    many = listing("LlamaForCausalLM", num_hidden_layers=60, **small)
    assert len(few) == len(many)


def test_ties_stand_at_the_end():
    lines = listing("GPT2LMHeadModel", n_layer=1)
    assert lines[-1] == "tied: transformer.wte.weight = lm_head.weight"


def test_no_colours_where_nobody_looks():
    assert not any("\x1b" in line for line in listing("GPT2LMHeadModel", n_layer=1))
