"""Statements that are left out of a `forward`, written before a line, or kept."""

import pytest

from tests.rewriting import refused, rewritten
from tests.stages.test_refusals import SCHEDULE, written
from tests.stages.test_text import method

CUT = SCHEDULE.format(cut='s["first"]')


def stages_of(folder, *lines: str, init: str = "", cut: str = CUT) -> str:
    source = written(*lines).replace(
        "        self.inner =", f"        {init}\n        self.inner ="
    )
    return rewritten(folder, source, cut).files["pipeline.py"]


def test_masks_by_name_are_made_in_each_stage(tmp_path):
    lines = [
        "x = self.first(x)",
        "if not isinstance(masks := y, dict):",
        '    kwargs = {"input": x, "dtype": torch.float32}',
        '    masks = {"zeros": torch.zeros_like(**kwargs)}',
        "    if self.both:",
        '        masks["ones"] = torch.ones_like(x)',
        'x = self.inner(x) * masks["ones"]',
        'x = self.sequence(x) + masks["zeros"] + masks["ones"]',
    ]
    text = stages_of(
        tmp_path, *lines, init="self.both = True", cut=SCHEDULE.format(cut='s["inner"]')
    )
    assert 'SETTINGS = {"both": True}' in text
    assert (
        method(text, 1, "forward")
        == """\
def forward(self, x):
    masks = {"zeros": torch.zeros_like(input=x, dtype=torch.float32)}
    masks["ones"] = torch.ones_like(x)
    x = self.sequence(x) + masks["zeros"] + masks["ones"]
    last_output = self.last(x)
    return last_output"""
    )


def test_what_a_condition_names_stands_before_it(tmp_path):
    lines = ["x = self.first(x)", "if (n := x.shape[0]) > 1:", "    x = x / n", "x = self.inner(x)"]
    text = stages_of(tmp_path, *lines, cut=SCHEDULE.format(cut='s["inner"]'))
    body = method(text, 0, "forward")
    assert "    n = x.shape[0]\n    if n > 1:\n        x = x / n\n" in body


@pytest.mark.parametrize(
    "line", ["if x.sum() > 9 and (n := 3):", "if x.numel() > (x := x + 1).numel():"]
)
def test_what_a_condition_may_name_is_refused(line, tmp_path):
    source = written("n = 1", "x = self.first(x)", line, "    x = x * n", "x = self.inner(x)")
    text = refused(tmp_path, source, CUT, "SR310")
    assert ":=` cannot be moved to a line before the statement" in text
    assert f"{line}\n" in text


def test_branches_keep_their_form(tmp_path):
    lines = [
        "x = self.first(x)",
        "if x.sum() > 9:",
        "    x = x + 1",
        "elif x.sum() > 8:",
        "    raise ValueError(x)",
        "else:",
        "    x = (",
        "        x + 2",
        "        if x.dim() > 1",
        "        else x",
        "    )",
        "x = self.inner(x)",
    ]
    body = method(stages_of(tmp_path, *lines), 1, "forward")
    assert "    elif x.sum() > 8:\n        raise ValueError(x)\n    else:\n" in body
    assert "x = x + 2 if x.dim() > 1 else x" in body


@pytest.mark.parametrize(
    ("init", "condition", "settings"),
    [
        ("self.n = 3", "self.n is None", '{"n": ...}'),
        ("self.n = None", "self.n is not None", '{"n": None}'),
        ("self.n = 3", "self.n == 4", '{"n": Unlike(4)}'),
        ("self.n = 3", "not self.n != 4", '{"n": 3}'),
        ("self.n = 3; self.m = 4", "self.n >= self.m", '{"n": Compared("<", "m")}'),
        ("self.n = 3; self.m = 4", "self.n == self.m", '{"n": Compared("!=", "m")}'),
        ("self.n = 3; self.m = None", "self.n and self.m", '{"n": Compared(">", 0), "m": None}'),
        ("self.n = 3", "self.n + 1 == 5", '{"n": 3}'),
        ("self.n = True", "self.n == 4", '{"n": Unlike(4)}'),
        ("self.n = 3", "self.n is None or self.n == 4", '{"n": 3}'),
        ("self.n = nn.Linear(8, 8)", "self.n is None", '{"n": ...}'),
        ("self.n = nn.Linear(8, 8)", "hasattr(self, 'm')", None),
        ("self.n = 0.5", "self.n > 1", None),
        ("self.n = 3", "self.changed and self.training", None),
    ],
)
def test_a_branch_is_left_out_where_the_settings_that_say_so_are_checked(
    init, condition, settings, tmp_path
):
    lines = ["x = self.first(x)", "x = self.inner(x)", f"if {condition}:", "    x = x + 1"]
    lines += ["self.changed = False"]
    text = stages_of(tmp_path, *lines, init=f"self.changed = False; {init}")
    assert (f"SETTINGS = {settings}" in text) if settings else ("SETTINGS" not in text)
    assert ("x = x + 1" in text) is (settings is None)


SETTER = "    def remake(self, on=True):\n        self.remade = on\n\n    def forward(self, x, y):"


def test_a_way_that_a_method_may_choose_is_looked_at_in_each_step(tmp_path):
    lines = ["if self.remade:", "    x = checkpoint(self.sequence, x)", "else:"]
    lines += ["    for layer in self.layers:", "        x = layer(x)", "x = self.sequence(x)"]
    source = written(*lines).replace(
        "        self.inner =", "        self.remade = False\n        self.inner ="
    )
    source = source.replace("    def forward(self, x, y):", SETTER)
    cut = SCHEDULE.format(cut='s["layers"][1]')
    text = rewritten(tmp_path, source, cut).files["pipeline.py"]
    assert "in self.layers[:2]:" in text and "in self.layers[2:]:" in text
    assert 'FixedSettings(("remade",))' in text
    # What a step itself sets says nothing of the next one.
    changing = source.replace("x = self.sequence(x)", "x = self.sequence(x); self.remake(False)")
    refused(tmp_path, changing, cut, "SR310")


def test_an_expression_of_several_lines_stays_one(tmp_path):
    """Its second line alone would be a valid statement without an effect."""
    text = stages_of(tmp_path, "x = (", "    self.first(x)", "    + x", ")")
    assert "self.first(x) + x" in method(text, 0, "forward")


def test_what_is_sifted_of_keywords_that_nobody_gave_is_nothing(tmp_path):
    lines = [
        'shared = {key: kwargs[key] for key in ["scale"] if key in kwargs}',
        "own = {key: value for key, value in kwargs.items() if key > 'a'}",
        "own = own | shared",
        'if "scale" in own:',
        "    x = own.pop('scale') * x",
        "x = self.inner(self.first(x), **own)",
    ]
    source = written(*lines).replace("x, y)", "x, y, **kwargs)", 1)
    cut = SCHEDULE.format(cut='s["inner.a"]')
    text = rewritten(tmp_path, source, cut).files["pipeline.py"]
    assert method(text, 0, "forward").endswith("(x)\n    x = self.inner.a(x)\n    return x")


def test_a_negative_number_keeps_its_name(tmp_path):
    lines = ["n = 2 - 5", "m = 2 + 1", "x = self.first(x)", "x = self.inner(x) * n ** 2 + m"]
    text = stages_of(tmp_path, *lines)
    assert "n ** 2 + 3" in text.replace("n**2", "n ** 2") and "n = 2 - 5" in text


def test_a_number_that_a_name_stands_for_decides_nothing(tmp_path):
    lines = ["n = self.n", "x = self.first(x)", "x = self.inner(x)", "if n is not None:"]
    text = stages_of(tmp_path, *lines, "    x = x * n", init="self.n = 3")
    assert "if n is not None:" in text and "SETTINGS" not in text


def test_what_is_handed_on_is_what_it_was(tmp_path):
    lines = ['kwargs = {"input": x, "other": x}', "x = self.first(x)", "x = self.inner(x)"]
    source = written(*lines, "x = torch.add(**kwargs)")
    assert "this was computed from `x`, which has another value" in refused(
        tmp_path, source, CUT, "SR310"
    )


def test_tuples_stay_tuples(tmp_path):
    lines = [
        "kept, one, both = (), (y,), (y, (y, x))",
        "x = self.first(x)",
        "for each in self.layers:",
        "    kept = kept + (x,)",
        "x = self.inner(x) + sum(kept) + one[0] + both[1][0]",
    ]
    lines[0:1] = ["kept = ()", "one = (y,)", "both = (y, (y, x))"]
    body = method(
        stages_of(
            tmp_path,
            *lines,
            init="self.layers = [1, 2]",
            cut=SCHEDULE.format(cut='s["inner"]'),
        ),
        0,
        "forward",
    )
    assert "    kept = ()\n" in body
    assert "    one = (y,)\n" in body or "    one = y,\n" in body
    assert "    both = y, (y, x)\n" in body


def test_a_dictionary_is_its_elements(tmp_path):
    lines = [
        "found = {}",
        'if found.get("one") is None and y is not None:',
        '    found["one"] = self.inner(x)',
        "x = self.first(x)",
        'if found.get("two") is not None:',
        '    x = x + found["two"]',
        'x = x + found["one"]',
    ]
    text = stages_of(tmp_path, *lines)
    assert (
        method(text, 0, "forward")
        == """\
def forward(self, x):
    found_one = self.inner(x)
    x = self.first(x)
    return found_one, x"""
    )
    assert "    x = x + found_one\n" in method(text, 1, "forward")


def test_a_dictionary_that_may_be_filled(tmp_path):
    """It is built before the branch that changes it, with its present entries."""
    lines = [
        "found = {}",
        'found["one"] = self.inner(x)',
        "if x.sum() > 0:",
        '    found["two"] = x',
        'x = self.first(x + found["one"] + found.get("two", 0))',
        "x = self.sequence(x)",
    ]
    text = stages_of(tmp_path, *lines)
    assert (
        method(text, 0, "forward")
        == """\
def forward(self, x):
    found_one = self.inner(x)
    found = {"one": found_one}
    if x.sum() > 0:
        found["two"] = x
    x = self.first(x + found["one"] + found.get("two", 0))
    return x"""
    )


GOT = """\

    def get_inner(self):
        return {got}

    def forward(self, x, y):
"""


def with_accessor(got: str) -> str:
    lines = [
        "x = self.get_inner()(x)",
        "n = torch.arange(x.shape[1]).unsqueeze(0) + 1",
        "if x is None or n is None:",
        "    x = y",
        "x = self.first(x) * n",
        "x = self.sequence(x)",
    ]
    head = "\n    def forward(self, x, y):\n"
    return written(*lines).replace(head, GOT.format(got=got))


def test_the_module_that_a_method_gives(tmp_path):
    text = rewritten(tmp_path, with_accessor("self.inner"), CUT).files["pipeline.py"]
    assert (
        method(text, 0, "forward")
        == """\
def forward(self, x):
    x = self.inner(x)
    n = torch.arange(x.shape[1]).unsqueeze(0) + 1
    x = self.first(x) * n
    return x"""
    )


def test_the_module_that_a_method_chooses(tmp_path):
    """It may be another one for another model, and the stages would not know."""
    text = refused(tmp_path, with_accessor('getattr(self, "in" + "ner")'), CUT, "SR310")
    assert "the stages fail where the model does not" in text


def test_how_many_layers_there_are(tmp_path):
    """A stage that holds some of them knows it too."""
    lines = [
        "count = len(self.layers)",
        "for i, layer in enumerate(self.layers):",
        "    x = layer(x)",
        "    if i != count - 1:",
        "        x = x * 2",
    ]
    text = stages_of(tmp_path, *lines, cut=SCHEDULE.format(cut='s["layers"][1]'))
    second = method(text, 1, "forward")
    assert "    count = len(self.layers)\n" in second
    assert "for i, layer in enumerate(self.layers[2:], start=2):" in second
    assert method(text, 1, "held").startswith(
        "def held(self):\n    return self.layers[2:], self.last"
    )


def test_a_tensor_that_is_no_buffer_is_held_where_it_is_read(tmp_path):
    lines = ["x = self.first(x + self.positions)", "x = self.inner(x) * self.scales"]
    text = stages_of(tmp_path, *lines, init="self.positions, self.scales = torch.rand(2, 8)")
    held = [method(text, number, "held") for number in (0, 1)]
    assert ["self.positions" in each for each in held] == [True, False]
    assert ["self.scales" in each for each in held] == [False, True]


def of_a_record(taken: str) -> str:
    made = "found = BaseModelOutput(last_hidden_state=x, hidden_states=z)"
    source = written("x = self.first(x)", "z = x * 2", made, taken, "x = self.inner(x + w)")
    imported = "from transformers.modeling_outputs import BaseModelOutput\n"
    return source.replace("import torch\n", f"import torch\n{imported}", 1)


def test_the_first_fields_of_a_record_are_its_values(tmp_path):
    text = rewritten(tmp_path, of_a_record("x, w = found[:2]"), CUT).files["pipeline.py"]
    assert "        w = z\n" in text and "found" not in text


def test_fields_that_change_places_are_refused(tmp_path):
    text = refused(tmp_path, of_a_record("z, x = found[:2]; w = z"), CUT, "SR310")
    assert "this was computed from `x`, which has another value now" in text
    assert "give that value another name than `x`" in text


FEATURES = """\
    @torch.{decorator}()
    def features(self, x):
        found = BaseModelOutput(last_hidden_state=self.first(x))
{lines}
        return found

    def forward(self, x, y):
"""
SET_ANEW = ["found.last_hidden_state = found.last_hidden_state * 2"]
ALIASED = ["other = found", "found.last_hidden_state = other.last_hidden_state * 2"]


def with_features(decorator: str, *lines: str) -> str:
    """A model of which a decorated method makes a record and sets a field of that anew."""
    text = of_a_record("x, w = found[:2]").replace("x = self.first(x)", "found = self.features(x)")
    text = text.replace("x = self.inner(x + w)", "x = self.inner(found.last_hidden_state)")
    kept = [each for each in text.split("\n") if "z = x * 2" not in each and "w =" not in each]
    kept = [each for each in kept if "found = Base" not in each]
    body = "\n".join(f"        {line}" for line in lines)
    made = FEATURES.format(decorator=decorator, lines=body)
    return "\n".join(kept).replace("    def forward(self, x, y):\n", made)


def test_a_method_with_a_decorator_may_set_a_field_anew(tmp_path):
    text = rewritten(tmp_path, with_features("enable_grad", *SET_ANEW), CUT).files["pipeline.py"]
    assert "found_last_hidden_state = self.first(x) * 2\n" in method(text, 0, "forward")


def test_a_field_that_is_set_anew_is_no_other_records(tmp_path):
    text = refused(tmp_path, with_features("enable_grad", *ALIASED), CUT, "SR310")
    assert "`found.last_hidden_state` changes after the record `found` was created" in text


def test_what_a_decorator_does_is_noticed(tmp_path):
    text = refused(tmp_path, with_features("no_grad", *SET_ANEW), CUT, "SR310")
    assert "the stages do not compute what the model computes" in text


WANTED = ["wanted = set(wanted)", "x = self.first(x)", "if 3 in wanted:", "    x = x * 2"]


def test_a_list_that_is_given_by_default_is_made_where_it_is_read(tmp_path):
    source = written(*WANTED, "x = self.inner(x)").replace("x, y)", "x, y, wanted=[1, 3])")
    text = rewritten(tmp_path, source, CUT).files["pipeline.py"]
    assert "    wanted = [1, 3]\n    wanted = set(wanted)\n" in method(text, 1, "forward")


def test_a_number_below_zero_that_is_given_by_default_has_its_name(tmp_path):
    lines = ["x = self.first(x) * which", "x = self.inner(x) * (which == 0)"]
    source = written(*lines).replace("x, y)", "x, y, which=-1)")
    text = rewritten(tmp_path, source, CUT).files["pipeline.py"]
    for number in (0, 1):
        assert "    which = -1\n" in method(text, number, "forward")


@pytest.mark.parametrize(
    "line", ["wanted.append(x)", "wanted[0] = x", "wanted += [1]", "f(wanted)"]
)
def test_a_list_that_is_given_by_default_and_may_change_is_refused(line, tmp_path):
    """Steps share it: a step would find what those before it have left."""
    given = "x, y, wanted=[1, 3], f=len)"
    source = written("x = self.first(x)", line, "x = self.inner(x)").replace("x, y)", given)
    assert "is one object for all steps" in refused(tmp_path, source, CUT, "SR310")
