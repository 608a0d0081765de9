"""Verification in real processes: it accepts correct outputs, and explains errors."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from slapo_rewrite import errors
from slapo_rewrite.verify import launch, run
from slapo_rewrite.verify.rank_layout import Layout
from slapo_rewrite.verify.run import chosen, verify

from . import outputs

pytestmark = pytest.mark.processes


def wrong(report):
    """Names of the checks that do not hold."""
    return {row.name for row in report.rows if not row.ok}


@pytest.mark.usefixtures("own_fork_server")
def test_right_output_passes_at_both_world_sizes(tmp_path):
    # A folder whose name cannot be imported by an import statement.
    out = outputs.write(tmp_path, "out-1.2")
    before = sorted(p.name for p in out.rglob("*"))
    stages, checked = [], []
    report = verify(out, [1, 2], progress=stages.append, checked=checked.append)
    text = report.render()
    assert report.ok, text
    assert text.endswith("verified: rewritten equals original at world sizes 1, 2\n")
    assert not report.warnings
    assert report.notes == ["dropout is set to 0 in both models"]
    assert report.shares[1] == 1
    assert 0.5 < report.shares[2] < 0.8
    names = [row.name for row in report.rows if row.world == 2]
    assert names == [
        "builds what was rewritten",
        "loads the original's weights",
        "gives them back bit for bit",
        "keeps tied parameters tied",
        "outputs",
        "loss",
        "gradients complete",
        "gradients",
        "outputs in eval mode",
        "gradients with dropout",
        "losses of steps 2 to 3",
        "weights after 3 steps",
    ]
    gradients = next(row for row in report.rows if row.name == "gradients" and row.world == 2)
    assert gradients.limit == 1e-3
    assert gradients.error < 1e-4 and gradients.own < 1e-4 and gradients.reference < 1e-4
    dropout = [row.detail for row in report.rows if row.name == "gradients with dropout"]
    assert dropout == ["", ""]  # it was compared
    assert checked == [f"world size {row.world}: {row.name}: ok" for row in report.rows]
    assert {s.split(":")[0] for s in stages} == {"world size 1", "world size 2"}
    assert sorted(p.name for p in out.rglob("*")) == before
    record = json.dumps(report.record())
    assert record == json.dumps(json.loads(record))
    assert json.loads(record)["verdict"] == "equal"


def test_an_error_beyond_its_limit_is_wrong_once_float64_has_decided(tmp_path):
    said = []
    ranks = launch.Ranks(None, {}, 2, tmp_path, 1.0, said.append, said.append)
    for first, second in (({"loss": True}, {"loss": None}), ({"loss": True}, {"loss": True})):
        (tmp_path / "0.checks").write_text(json.dumps(first))
        (tmp_path / "1.checks").write_text(json.dumps(second))
        ranks._tell()
        ranks._tell()  # nothing new
    (tmp_path / "0.checks").write_text('{"loss": false}')
    ranks._tell()
    assert said == [f"world size 2: loss: {word}" for word in ("beyond its limit", "ok", "WRONG")]


def test_missing_all_reduce(tmp_path):
    change = ("SumForward.apply(F.linear(x, self.weight))", "F.linear(x, self.weight)")
    out, checked = outputs.write(tmp_path, "out", {"tensor_parallel.py": change}), []
    report = verify(out, [2], checked=checked.append)
    text = report.render()
    assert {"outputs", "loss", "gradients", "outputs in eval mode"} <= wrong(report)
    assert "world size 2: keeps tied parameters tied: ok" in checked
    assert "world size 2: outputs: WRONG" in checked
    assert "NOT equal at world size 2: outputs, loss, gradients" in text
    assert "first module with another output: blocks.0.down" in text
    place = f'{tmp_path / "plan.py"}:14: s["blocks.*.down"].sync("fwd_post", "all_reduce")'
    assert place in text
    assert "first: embed.weight by" in text


def test_other_initial_weights(tmp_path):
    """As where an initialisation asks for `type(m) is nn.Linear`, and the class is another now."""
    rest = "super().__init__(features, outputs // world())"
    change = (rest, rest + "\n        nn.init.ones_(self.weight)")
    report = verify(outputs.write(tmp_path, "out", {"tensor_parallel.py": change}), [1])
    assert wrong(report) == {"starts with the original's weights"}
    text = report.render()
    assert "blocks.0.up.weight has other values" in text
    assert f'{tmp_path / "plan.py"}:11: s["blocks.*.up"].shard' in text


def test_wrong_gradients_with_a_right_loss(tmp_path):
    change = ("        return total(grad)", "        return grad")
    report = verify(outputs.write(tmp_path, "out", {"tensor_parallel.py": change}), [2])
    text = report.render()
    assert "gradients" in wrong(report)
    assert not {"outputs", "loss", "outputs in eval mode", "gradients complete"} & wrong(report)
    assert "first module with another output" not in text
    assert "first: embed.weight by" in text
    assert "so the first that the backward pass gets wrong, worst: blocks.1.norm.bias by" in text
    right = "right again: blocks.1.up.weight, in module blocks.1.up\n"
    assert f"{right}      {tmp_path}/plan.py:11: s[" in text


def test_recomputation_with_other_random_numbers(tmp_path):
    plain = "            x = block(x)\n"
    again = "checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)"
    recompute = "            from torch.utils.checkpoint import checkpoint\n"
    recompute += f"            x = {again}\n"
    report = verify(outputs.write(tmp_path, "out", {"net.py": (plain, recompute)}), [1])
    assert wrong(report) == {"gradients with dropout"}
    assert "NOT equal at world size 1: gradients with dropout\n" in report.render()


def test_lost_tie_at_world_size_1(tmp_path):
    change = ("        self.head.weight = self.embed.weight\n", "")
    out = outputs.write(tmp_path, "out", {"net.py": change})
    (tmp_path / "net.py").write_text(outputs.MODEL + "\n# A later edit.\n")
    report = verify(out, [1])
    text = report.render()
    assert "keeps tied parameters tied" in wrong(report)
    assert "head.weight is no longer embed.weight" in text
    assert report.changed == ["source"]
    assert "is not the one that the output was made from" in text


def test_wrong_state_dict(tmp_path):
    change = (
        "return to_full(model, model.state_dict())",
        "return {n: t.flip(0) if 'down.weight' in n else t for n, t in "
        "to_full(model, model.state_dict()).items()}",
    )
    report = verify(outputs.write(tmp_path, "out", {"loading.py": change}), [2])
    assert wrong(report) == {"gives them back bit for bit"}
    assert (
        "gives them back bit for bit (rank 0): blocks.0.down.weight has other values"
        in report.render()
    )
    assert "blocks.0.down.weight, in module blocks.0.down" in report.render()


def test_renamed_parameter_stops_at_loading(tmp_path):
    report = verify(outputs.write(tmp_path, "out", {"net.py": ("self.up", "self.lift")}), [1])
    assert wrong(report) == {"loads the original's weights"}
    assert 'Missing key(s) in state_dict: "blocks.0.lift.weight"' in report.render()
    assert not report.failures


def test_output_that_tries_the_tool(tmp_path):
    optional = "try:\n    import slapo_rewrite.errors\nexcept ImportError:\n    pass\n\n\ndef world"
    out = outputs.write(tmp_path, "out", {"tensor_parallel.py": ("def world", optional)})
    report = verify(out, [1])
    assert wrong(report) == {"runs without the tool"}
    assert "tensor_parallel.py:8 imports slapo_rewrite" in report.render()


@pytest.mark.usefixtures("own_fork_server")
def test_output_that_needs_the_tool(tmp_path):
    needed = ("def world", "import slapo_rewrite.errors\n\n\ndef world")
    report = verify(outputs.write(tmp_path, "out", {"tensor_parallel.py": needed}), [1, 2])
    text = report.render()
    assert "NOT verified: the process at world size 1 fails during: importing the output" in text
    assert "an output must not need the tool" in text
    assert [failure.world for failure in report.failures] == [1]  # 2 would say the same


def test_rank_that_crashes_is_the_one_that_is_shown(tmp_path):
    crash = (
        "    x = x.clone()\n",
        "    x = x.clone()\n    if rank() == 1:\n        "
        "raise ValueError('12 features do not fit')\n",
    )
    report = verify(outputs.write(tmp_path, "out", {"tensor_parallel.py": crash}), [2])
    text = report.render()
    assert not report.ok
    assert "rank 1 at world size 2 fails during: the rewritten model's first step" in text
    assert "ValueError: 12 features do not fit" in text
    assert 'tensor_parallel.py", line 18, in total' in text
    assert "Connection" not in text
    assert report.record()["verdict"] == "failed"


@pytest.mark.long
@pytest.mark.usefixtures("own_fork_server")
def test_rank_that_dies_without_a_word(tmp_path):
    death = (
        "    x = x.clone()\n",
        "    x = x.clone()\n    import os\n    os.kill(os.getpid(), 9)\n",
    )
    report = verify(outputs.write(tmp_path, "out", {"tensor_parallel.py": death}), [1])
    expected = "dies with signal 9 during: the rewritten model's first step"
    assert expected in report.render()


@pytest.mark.long
def test_rank_that_hangs(tmp_path):
    hang = (
        "    x = x.clone()\n",
        "    x = x.clone()\n    if rank() == 1:\n        import time\n        "
        "print('asleep', flush=True)\n        time.sleep(600)\n",
    )
    out = outputs.write(tmp_path, "out", {"tensor_parallel.py": hang})
    start = time.monotonic()
    report = verify(out, [2], timeout_s=8)
    text = report.render()
    assert time.monotonic() - start < 30
    assert "world size 2 hangs: not done after 8 s" in text
    assert "rank 0: the rewritten model's first step" in text
    assert "rank 1: the rewritten model's first step" in text
    assert 'tensor_parallel.py", line 20 in total' in text
    assert "      it printed: asleep\n" in text


def test_interrupt_leaves_no_process(tmp_path, monkeypatch):
    started = []

    class Recorded(launch.ForkServer):
        def start(self, *args):
            started.append(super().start(*args))
            return started[-1]

    def interrupt(text):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "ForkServer", Recorded)
    with pytest.raises(KeyboardInterrupt):
        verify(outputs.write(tmp_path, "out"), [2], progress=interrupt)
    assert len(started) == 2
    for process in started:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_a_process_that_leads_no_group_as_yet_is_ended(tmp_path):
    """Nobody else would end it: who waits for it waited for good."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        (tmp_path / "state").write_text(str(process.pid))
        server = SimpleNamespace(lives=lambda: True)
        launch.ForkedProcess(server, tmp_path / "state").kill()
        assert process.wait(10) == -signal.SIGKILL


def test_without_a_word_everything_is_verified(tmp_path):
    assert chosen(tmp_path) == [1, 2]
    assert chosen(tmp_path, [4]) == [4]
    (tmp_path / "pipeline.py").write_text("STAGES = (Stage0, Stage1, Stage2)\n")
    assert chosen(tmp_path) == [1, 2, Layout(3)]
    assert chosen(tmp_path, [4]) == [4]
    assert chosen(tmp_path, tensor=2) == [Layout(3, tensor=2)]
    assert chosen(tmp_path, [1], pipe=3, data=4) == [1, Layout(3, data=4)]


def test_bad_input_is_told_in_words(tmp_path):
    with pytest.raises(errors.NotAnOutput, match=r"has no rewrite\.json"):
        verify(tmp_path)
    out = outputs.write(tmp_path, "out")
    with pytest.raises(errors.UsageError, match=r"not \[0\]"):
        verify(out, [0])
    with pytest.raises(errors.SourceError, match=r"no source file `gone\.py`"):
        verify(out, source="gone.py")
    with pytest.raises(errors.ScheduleError, match=r"no schedule file `gone\.py`"):
        verify(out, schedule="gone.py")
    (out / "net.py").unlink()
    with pytest.raises(errors.NotAnOutput, match=r"has no net\.py"):
        verify(out)
    (out / "rewrite.json").write_text("{")
    with pytest.raises(errors.NotAnOutput, match="is damaged"):
        verify(out)
