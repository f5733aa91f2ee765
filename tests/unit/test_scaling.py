"""The simulation of kernel files on many workers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from scripts.base.errors import UsageError
from scripts.lab import scaling
from tests.unit.conftest import Command

LOG = """# ninja log v7
1\t42875\t17\t/b/binding/3327/flash_api.o\tbe40
1\t5000\t17\t/b/kernels/e3fc/split_hdim128_bf16.o\t2061
5000\t8000\t17\t/b/kernels/e3fc/fwd_hdim64_bf16.o\t2061
8000\t9500\t18\t/b/kernels/e3fc/fwd_hdim64_bf16.o\t2061
"""


def test_more_workers_are_never_slower_and_the_longest_file_is_the_end_of_it() -> None:
    for case in scaling.cases([125.0, 100.0, 80.0, 60.0] * 6, 4):
        lengths = [case.length(n) for n in scaling.WORKERS]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] == pytest.approx(case.total)
        assert lengths[-1] == max(case.seconds)
        assert case.length(case.enough) == max(case.seconds) < case.length(case.enough - 1)


def test_each_file_runs_once_and_a_worker_has_one_at_a_time() -> None:
    plan = scaling.planned([5, 9, 2, 7, 7, 1], 2)
    assert sorted(placed.file for placed in plan) == [0, 1, 2, 3, 4, 5]
    assert [placed.file for placed in plan[:2]] == [1, 3], "the longest first"
    for slot in (0, 1):
        mine = [placed for placed in plan if placed.slot == slot]
        assert all(before.end <= after.start for before, after in itertools.pairwise(mine))


def test_a_divided_file_costs_the_headers_once_more_for_each_part() -> None:
    whole, halves, *_ = scaling.cases([100.0, 20.0], 1)
    assert len(halves.seconds) == 3
    assert halves.total == pytest.approx(whole.total + scaling._HEADERS)


def test_times_of_a_build_are_read_from_its_log(tmp_path: Path, command: Command) -> None:
    log = tmp_path / ".ninja_log"
    log.write_text(LOG)
    assert scaling.logged(log) == [4.999, 1.5], "kernel files alone, and the last of each"
    picture = tmp_path / "workers.svg"
    ended = command("bench", "workers", "--from", str(log), "--picture", str(picture), "--json")
    assert ended.status == 0
    assert json.loads(ended.out)[0]["seconds"]["256"] == 4.999
    again = tmp_path / "again" / "workers.svg"
    again.parent.mkdir()
    assert command("bench", "workers", "--from", str(log), "--picture", str(again)).status == 0
    assert picture.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("text", ["", "# ninja log v7\n", "1\t2\t3\t/b/kernels/e/a.o\t4\n"])
def test_what_is_no_log_of_kernel_files_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(UsageError, match=r"log: not a log of ninja's with kernel files"):
        scaling.logged(tmp_path / "log")
    with pytest.raises(UsageError, match=r"absent: .*No such file"):
        scaling.logged(tmp_path / "absent")
