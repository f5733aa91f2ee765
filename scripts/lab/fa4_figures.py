"""Figures of FlashAttention-4's kernels, as ``tests/wheel4/bench.py --json`` writes them, and their goals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from scripts.base import documents
from scripts.base.documents import OpenDocument
from scripts.base.errors import UsageError
from scripts.lab import pictures
from scripts.lab.kernel_figures import Goal, mean, worst

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

HEAD_DIMS = (64, 128)  # that peers were measured at
_ONE_SPLIT, _LONGEST = "off", "1x131072"


class Row(OpenDocument):
    """What one variant took for one case."""

    group: str
    head_dim: int
    case: str
    variant: str
    ms: float  # the median


class Figures(OpenDocument):
    """What the file holds; it has more, for readers."""

    format: Literal[1]
    gpu: str
    torch: str
    rows: tuple[Row, ...]

    def cases(self, group: str, head_dim: int) -> dict[str, dict[str, float]]:
        """Milliseconds by case and variant."""
        found: dict[str, dict[str, float]] = {}
        for row in self.rows:
            if (row.group, row.head_dim) == (group, head_dim):
                found.setdefault(row.case, {})[row.variant] = row.ms
        return found


def read(path: Path) -> Figures:
    """The figures in a file.

    Raises:
        UsageError: it is no such file.
    """
    remedy = "give a file that tests/wheel4/bench.py --json wrote"
    return documents.read(Figures, path, error=UsageError, remedy=remedy)


def best_peer(case: Mapping[str, float]) -> float:
    """The least time of a case without this series' mode: as released, cuDNN's, or the other series'."""
    return min(ms for variant, ms in case.items() if not variant.startswith("on"))


def ratios(
    figures: Figures,
    group: str,
    head_dim: int,
    variant: str,
    base: Callable[[Mapping[str, float]], float],
) -> dict[str, float]:
    """A variant's time over that of ``base``, by case."""
    cases = figures.cases(group, head_dim)
    return {name: case[variant] / base(case) for name, case in cases.items() if variant in case}


def goals(figures: Figures) -> list[Goal]:
    """What the mode is held to on Hopper, at each head dim that peers were measured at."""
    return [goal for head_dim in HEAD_DIMS for goal in _goals_at(figures, head_dim)]


def _goals_at(figures: Figures, d: int) -> list[Goal]:
    off, ordered = (lambda case: case["off"]), (lambda case: case["off, deterministic"])
    prefill = [*ratios(figures, "prefill", d, "on 2048", off).values()]
    short = [*ratios(figures, "prefill", d, "on 512", off).values()]
    backward = [*ratios(figures, "backward", d, "on", ordered).values()]
    causal = [r for case, r in ratios(figures, "backward", d, "on", off).items() if "causal" in case]
    decode = [*ratios(figures, "decode", d, "on 2048", best_peer).values()]
    chunked = [*ratios(figures, "chunked", d, "on 2048", best_peer).values()]
    longest = figures.cases("decode", d).get(_LONGEST, {})
    faster = longest[_ONE_SPLIT] / longest["on 2048"] if {_ONE_SPLIT, "on 2048"} <= longest.keys() else None
    told = [
        Goal("prefill, over the mode off: geometric mean", mean(prefill), 1.03, "×"),
        Goal("prefill, over the mode off: the worst", worst(prefill), 1.08, "×"),
        Goal("prefill, split_size 512: geometric mean", mean(short), 1.12, "×"),
        Goal("backward, over deterministic=True: geometric mean", mean(backward), 1.03, "×"),
        Goal("backward, causal, over atomics: the worst", worst(causal), 1.15, "×"),
        Goal("decode, over the best of all: geometric mean", mean(decode), 1.0, "×"),
        Goal("decode, over the best of all: the worst", worst(decode), 1.10, "×"),
        Goal("decode of 1 on 131072 keys, faster than one split", faster, 6.0, "×", at_least=True),
        Goal(
            "512 new tokens on a cache, over the best of all: the worst",
            worst(chunked),
            1.03,
            "×",
        ),
    ]
    return [Goal(f"D {d}: {one.what}", one.value, one.goal, one.unit, one.at_least) for one in told]


_PANELS = (
    ("prefill", "forward, over the mode off", ("on 2048", "on 512"), lambda case: case["off"]),
    ("backward", "backward, over atomics", ("off, deterministic", "on"), lambda case: case["off"]),
    ("decode", "decode, over the best of all others", ("on 2048", "on 512"), best_peer),
)


def draw(figures: Figures, path: Path) -> None:
    """The mode's time as a multiple of others', case by case, as a picture.

    Raises:
        UsageError: matplotlib is not installed.
    """
    picture = pictures.figure(11, 6.5)
    panels = picture.subplots(len(HEAD_DIMS), len(_PANELS), sharey=True)
    for axes_of_dim, head_dim in zip(panels, HEAD_DIMS, strict=True):
        for axes, (group, title, variants, base) in zip(axes_of_dim, _PANELS, strict=True):
            for variant, marker in zip(variants, "os", strict=True):
                found = ratios(figures, group, head_dim, variant, base)
                names = [name.replace("x", " × ") for name in found]
                axes.plot(names, [*found.values()], marker, label=variant)
            axes.axhline(1.0, color="black", linewidth=0.8)
            axes.set_title(f"head dim {head_dim}: {title}", fontsize=9)
            axes.tick_params(axis="x", rotation=30, labelsize=7)
            axes.grid(visible=True, axis="y", alpha=0.3)
            axes.legend(fontsize=7, loc="lower right")
    picture.suptitle(f"{figures.gpu}, torch {figures.torch}: FlashAttention-4 in deterministic mode, fp16")
    pictures.save(picture, path)
