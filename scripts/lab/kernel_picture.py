"""Draw the figures of kernels: time and memory over the length of sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scripts.lab import pictures

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.lab.kernel_figures import Figures

# The design that this fork replaces, with splits of 512 keys: accumulators of all splits in memory, reduced
# by PyTorch's operations. Measured on an H200 with 2.8.3, head dim 64, fp16, 32 heads, no mask: time as a
# multiple of upstream's, and MiB.
_NAIVE = ((4, 2048, 1.087 / 0.460, 650.0), (8, 4096, 7.682 / 3.368, 4680.0))

_LABELS = {
    "stock": "upstream",
    "on": "deterministic, default split_size",
    "on 512": "deterministic, split_size 512",
}


def draw(figures: Figures, path: Path) -> None:
    """Time and memory of 32768 tokens in all, as a picture (its kind by the name's suffix).

    Raises:
        UsageError: matplotlib is not installed.
    """
    picture = pictures.figure(10, 4)
    time, memory = picture.subplots(1, 2)
    _plot(figures, time, memory)
    for axes, title in (
        (time, "time, as a multiple of upstream's"),
        (memory, "memory above the inputs, MiB"),
    ):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("length of a sequence")
        axes.set_title(title)
        axes.grid(visible=True, alpha=0.3)
    time.set_ylim(bottom=0)
    memory.set_yscale("log")
    time.legend()
    picture.suptitle(
        f"{figures.gpu}, torch {figures.torch}: 32768 tokens, 32 heads, head dim 64, fp16, no mask"
    )
    pictures.save(picture, path)


def _plot(figures: Figures, time: Any, memory: Any) -> None:
    """A line for each variant into both axes, and a cross for the design that this fork replaces."""
    rows = [row for row in figures.rows if row.group == "length" and row.head_dim == 64]
    for variant, label in _LABELS.items():
        of_variant = [row for row in rows if row.variant == variant]
        lengths = [row.len_k for row in of_variant]
        time.plot(lengths, [row.ratio for row in of_variant], marker="o", label=label)
        memory.plot(lengths, [row.mb for row in of_variant], marker="o", label=label)
    lengths = [length for _, length, _, _ in _NAIVE]
    naive = {
        "marker": "x",
        "linestyle": "",
        "color": "tab:red",
        "label": "accumulators in memory, split 512 (2.8.3, H200)",
    }
    time.plot(lengths, [ratio for _, _, ratio, _ in _NAIVE], **naive)
    memory.plot(lengths, [mib * 32768 / (batch * length) for batch, length, _, mib in _NAIVE], **naive)
