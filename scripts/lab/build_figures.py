"""The figures of the build's cost, each beside its goal."""

from __future__ import annotations

from dataclasses import dataclass

_WHEELS = 16  # of a matrix of four torches and four Pythons


@dataclass(frozen=True)
class Spent:
    """What a step took."""

    cpu_seconds: float
    seconds: float


@dataclass(frozen=True)
class Side:
    """One of the two builds: CPU seconds of its kernel files and its binding, and what they make, stripped and deflated as in a wheel."""

    kernels: dict[str, float]
    binding: float
    deflated_bytes: int

    @property
    def cpu_seconds(self) -> float:
        """Of all kernel files."""
        return sum(self.kernels.values())


@dataclass(frozen=True)
class Line:
    """One figure beside its goal."""

    what: str
    ours: str
    upstream: str
    value: float
    goal: float
    unit: str

    @property
    def met(self) -> bool:
        """Whether the goal is."""
        return self.value <= self.goal


@dataclass(frozen=True)
class Ours:
    """What this build system's side took.

    Attributes:
        side: what upstream's is held against.
        without_bias: CPU seconds of the same kernel files without attn_mask and attn_bias; None where that was the choice.
        further: one more wheel from the same kernel objects.
        again: a build with nothing changed.
        recompiled: kernel files that a change of ``flash_api.cpp`` compiles again.
        share: of the kernel files, those that the further wheel compiled again.
    """

    side: Side
    without_bias: dict[str, float] | None
    further: Spent
    again: Spent
    recompiled: int
    share: float


def lines(taken: Ours, theirs: Side) -> list[Line]:
    """The figures, each beside its goal: ratios to upstream's side or to ours without masks and biases, and seconds."""
    ours, share = taken.side, taken.share
    one, other = ours.cpu_seconds, theirs.cpu_seconds
    without = sum(taken.without_bias.values()) if taken.without_bias else 0
    bindings = tuple(_WHEELS * side.binding for side in (ours, theirs))
    return [
        Line("nvcc, these kernel files", f"{one:.0f} CPU s", f"{other:.0f} CPU s", one / other, 0.6, "×"),
        Line(
            f"nvcc, {_WHEELS} wheels of one CUDA (and g++)",
            f"{one * (1 + (_WHEELS - 1) * share):.0f} (and {bindings[0]:.0f}) CPU s",
            f"{_WHEELS * other:.0f} (and {bindings[1]:.0f}) CPU s",
            1 + (_WHEELS - 1) * share,
            1.1,
            "× one's",
        ),
        *(
            [
                Line(
                    "nvcc, for masks and biases",
                    f"{one:.0f} CPU s, {without:.0f} without",
                    "",
                    one / without,
                    1.25,
                    "×",
                )
            ]
            if without
            else []
        ),
        Line(
            "a further torch or Python, installed",
            f"{taken.further.seconds:.0f} s",
            "",
            taken.further.seconds,
            90,
            "s",
        ),
        Line("nothing changed", f"{taken.again.seconds:.1f} s", "", taken.again.seconds, 5, "s"),
        Line(
            "flash_api.cpp changed: kernel files compiled", str(taken.recompiled), "", taken.recompiled, 0, ""
        ),
        Line(
            "extension, deflated",
            f"{ours.deflated_bytes / 1e6:.2f} MB",
            f"{theirs.deflated_bytes / 1e6:.2f} MB",
            ours.deflated_bytes / theirs.deflated_bytes,
            0.8,
            "×",
        ),
    ]
