"""How the thread blocks of the backward pass walk: compiled for the host from the real header, and gone through ticket by ticket."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from scripts.wheels.compiling import kernels
from tests.integration.wheels import applied, program, tools

if TYPE_CHECKING:
    from pathlib import Path

# Prints a line for each walk that leaves out a block of keys, has one twice, or not behind all before it in its column;
# then how many walks there were, and the most thread blocks for each block of keys where there are more than a few.
PROGRAM = """
#include "flash.h"
#include "fork_order.h"
#include <cstdio>
#include <vector>
using namespace FLASH_NAMESPACE;
int main() {
    int walks = 0;
    double most = 0;
    for (const int b : {1, 2, 3, 7, 16, 64}) for (const int h : {1, 2, 5, 8, 32, 40})
    for (int n = 1; n < 200; n += n < 40 ? 1 : 13) for (const int m : {1, 2, n, 2 * n + 1})
    for (const bool causal : {false, true}) {
        Flash_bwd_params params = {};
        params.b = b;
        params.h = h;
        const dim3 grid = fork_order::walk(params, 132, m, n, causal);
        const int tickets = int(grid.x * grid.y * grid.z), columns = b * h;
        std::vector<int> next(columns, 0);
        bool in_order = int(grid.x) == n;
        for (int ticket = 0; ticket < tickets; ++ticket) {
            const fork_order::Place place = fork_order::place_of(params, n, ticket);
            if (place.n_block >= n) { continue; }
            in_order = in_order && next[place.column]++ == place.n_block;
        }
        for (const int count : next) { in_order = in_order && count == n; }
        if (!in_order) { std::printf("b %d, h %d, %d blocks of keys, %d of queries, causal %d\\n", b, h, n, m, causal); }
        if (columns >= 32 && n >= 4) { most = std::max(most, double(tickets) / (columns * n)); }
        ++walks;
    }
    std::printf("%d %.2f\\n", walks, most);
}
"""


@pytest.mark.network
@pytest.mark.nvcc
def test_each_block_of_keys_has_one_ticket_behind_those_before_it_in_its_column(tmp_path: Path) -> None:
    root = applied().root
    includes = (*(root / folder for folder in kernels.INCLUDES), *tools().toolkit.include)
    told = program(PROGRAM, tmp_path, "-O1", *(f"-I{folder}" for folder in includes))
    walks, most = told[-1].split()
    assert told[:-1] == []
    assert int(walks) == 14976
    assert float(most) <= 2  # the others stop at once
