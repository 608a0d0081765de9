"""Facts read from the kernels' machine code, and their required values."""

import textwrap

import pytest

from benchmark import kernel_facts, report
from benchmark.compiled import counted, tally
from benchmark.kernel_facts import BARS, GPUS, SHOWN, resident

pytest.importorskip("triton")

LISTING = textwrap.dedent(
    """
        /*0000*/                   LDC R1, c[0x0][0x28] ;      /* 0x00000a00ff017b82 */
        /*0010*/              @P0 LDG.E.128 R4, desc[UR6][R2.64] ;
        /*0020*/                   LDG.E.U16 R9, desc[UR6][R2.64+0x10] ;
        /*0030*/                   MUFU.EX2 R10, R7 ;
        /*0040*/                   FADD R10, R10, R9 ;
        /*0050*/                   LDG.E.64 R12, desc[UR6][R2.64] ;
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0070*/                   ISETP.GE.AND P0, PT, R10, R29, PT ;
        /*0080*/                   FFMA R13, R13, R12, R1 ;
        /*0090*/               @P0 BRA 0x50 ;
        /*00a0*/                   STG.E.128 desc[UR6][R2.64], R4 ;
        /*00b0*/                   EXIT ;
        /*00c0*/                   BRA 0xc0;
        /*00d0*/                   NOP;
    """
)


@pytest.fixture(scope="module")
def results():
    return report.read(kernel_facts.NAME)


def test_instructions_are_counted():
    once, turn = counted(LISTING)
    assert once == {
        **dict.fromkeys(("integer", "barriers", "prefetched"), 0),
        **{"instructions": 7, "special": 1, "waits": 1, "load 16": 1, "load 2": 1, "store 16": 1},
    }
    assert turn == {
        **{"instructions": 5, "integer": 1, "barriers": 1, "waits": 1, "load 8": 1},
        **dict.fromkeys(("special", "prefetched"), 0),
    }


def test_one_wait_is_for_all_that_is_under_way():
    loads = ["LDG.E.128 R4, [R2.64]", "LDG.E.128 R8, [R2.64]"]
    assert tally([*loads, "FADD R1, R4, R9", "FADD R1, R5, R8"])["waits"] == 1
    assert tally([loads[0], "FADD R1, R1, R7", loads[1], "FADD R1, R5, R8"])["waits"] == 2


def test_programs_that_run_at_a_time():
    assert resident(154, 4, 1024, GPUS["sm_90"]) == 3
    assert resident(128, 4, 1024, GPUS["sm_90"]) == 4
    assert resident(16, 4, 1024, GPUS["sm_90"]) == 16
    assert resident(32, 4, 100_000, GPUS["sm_90"]) == 2


def test_figures_are_those_of_the_result_file(results):
    text = kernel_facts.table(results)
    assert report.marked(kernel_facts.NAME, text) in report.README.read_text()


def test_kernels_are_those_that_were_compiled(results):
    """Else run `python -m benchmark.kernel_facts`, which takes some minutes."""
    assert results["sources"] == kernel_facts.sources()


@pytest.mark.long
@pytest.mark.parametrize("case", [("swiglu", 3072), ("rms_norm", 1024)])
def test_a_kernel_compiles_to_what_was_written_down(case, results, monkeypatch):
    name, size = case
    monkeypatch.setattr(kernel_facts, "GPUS", {SHOWN: GPUS[SHOWN]})
    cases = [(k, axis, n) for k, axis, n in kernel_facts.cases() if (k.name, n) == case]
    ((kernel, axis, _),) = cases
    _, _, found = kernel_facts.measure((kernel_facts.KERNELS.index(kernel), axis, size))
    written = results["kernels"][name][str(size)]
    for direction in BARS:
        assert found[direction][SHOWN] == written[direction][SHOWN]


def misses(results, condition, gpus=tuple(GPUS)):
    """Kernels, sizes and directions of which it is so."""
    return [
        (name, size, direction, gpu)
        for name, sizes in results["kernels"].items()
        for size, found in sizes.items()
        for direction in BARS
        for gpu in gpus
        if condition(found[direction][gpu], direction)
    ]


def test_nothing_spills(results):
    assert not misses(results, lambda row, _: row["spilled_bytes"])


def test_memory_is_read_and_written_16_bytes_at_a_time(results):
    assert not misses(results, lambda row, _: kernel_facts.is_narrow(row))


def test_predictions_are_within_their_bars(results):
    assert not misses(results, lambda row, way: row["over_floor"] > BARS[way], [SHOWN])


def test_programs_that_share_rows_run_at_a_time(results):
    """Else a part of the GPU waits for the last of them."""

    def waits(row, _):
        resident = row["programs_a_multiprocessor"] * GPUS[SHOWN].multiprocessors
        return row["prefetched"] and row["programs"] > resident

    assert not misses(results, waits, [SHOWN])
