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
    """One of the two builds.

    CPU seconds of its kernel files and of its binding, and the size of the extension that they make, stripped
    and deflated as in a wheel.
    """

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
        without_bias: CPU seconds of the same kernel files without attn_mask and attn_bias; None where that
            was the choice.
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


def lines(ours: Ours, upstreams: Side) -> list[Line]:
    """The figures, each beside its goal.

    They are seconds, or ratios to upstream's side or to ours without masks and biases.
    """
    return [*_compiles(ours, upstreams), *_steps(ours), _size(ours.side, upstreams)]


def _compiles(ours: Ours, upstreams: Side) -> list[Line]:
    """CPU seconds of nvcc: for these files, for a matrix of wheels, and for masks and biases."""
    our_seconds, their_seconds = ours.side.cpu_seconds, upstreams.cpu_seconds
    our_bindings, their_bindings = (_WHEELS * side.binding for side in (ours.side, upstreams))
    all_wheels = 1 + (_WHEELS - 1) * ours.share  # as a multiple of one wheel's
    figures = [
        Line(
            "nvcc, these kernel files",
            f"{our_seconds:.0f} CPU s",
            f"{their_seconds:.0f} CPU s",
            our_seconds / their_seconds,
            0.6,
            "×",
        ),
        Line(
            f"nvcc, {_WHEELS} wheels of one CUDA (and g++)",
            f"{our_seconds * all_wheels:.0f} (and {our_bindings:.0f}) CPU s",
            f"{_WHEELS * their_seconds:.0f} (and {their_bindings:.0f}) CPU s",
            all_wheels,
            1.1,
            "× one's",
        ),
    ]
    if ours.without_bias:
        without = sum(ours.without_bias.values())
        told = f"{our_seconds:.0f} CPU s, {without:.0f} without"
        figures.append(Line("nvcc, for masks and biases", told, "", our_seconds / without, 1.25, "×"))
    return figures


def _steps(ours: Ours) -> list[Line]:
    """What a build takes that has the kernel objects already."""
    further, again = ours.further.seconds, ours.again.seconds
    changed = "flash_api.cpp changed: kernel files compiled"
    return [
        Line("a further torch or Python, installed", f"{further:.0f} s", "", further, 90, "s"),
        Line("nothing changed", f"{again:.1f} s", "", again, 5, "s"),
        Line(changed, str(ours.recompiled), "", ours.recompiled, 0, ""),
    ]


def _size(our_side: Side, upstreams: Side) -> Line:
    """The extension as a wheel holds it."""
    our_bytes, their_bytes = our_side.deflated_bytes, upstreams.deflated_bytes
    ours_told, theirs_told = (f"{size / 1e6:.2f} MB" for size in (our_bytes, their_bytes))
    return Line("extension, deflated", ours_told, theirs_told, our_bytes / their_bytes, 0.8, "×")
