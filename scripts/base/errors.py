"""Every error this project raises on purpose. ``main`` prints it and exits with its code."""

from __future__ import annotations


class BuildError(Exception):
    """What failed, why, and what to do, as one short paragraph."""

    exit_code = 1


class UsageError(BuildError):
    """The command line asks for something that is not there."""

    exit_code = 2


class NotVerified(BuildError):
    """A wheel could not be proved: its GPU half did not run."""

    exit_code = 3


class MatrixError(BuildError):
    """``wheel_matrix.toml`` is wrong."""

    exit_code = 4


class UpstreamError(BuildError):
    """The pinned upstream source cannot be had, or is not what the pin says."""

    exit_code = 5


class SeriesError(BuildError):
    """The patch series is malformed or does not apply."""

    exit_code = 6


class ToolchainError(BuildError):
    """No CUDA toolkit, torch or compiler that fits the target."""

    exit_code = 7


class CompileError(BuildError):
    """A compiler or the linker failed."""

    exit_code = 8


class WheelError(BuildError):
    """The wheel could not be made, or a wheel is damaged."""

    exit_code = 9


class VerifyError(BuildError):
    """A wheel failed its suite."""

    exit_code = 10


class GuardError(BuildError):
    """A patch's guard does not tell a tree with the patch from one without."""

    exit_code = 11


class ActionNeeded(BuildError):
    """A rebase stopped at a patch that a person must look at."""

    exit_code = 12
