"""The kernel files of a choice of wheels, as a scheduler's workers compile them.

A build of each wheel follows here: it finds the objects, compiles the binding, and links.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scripts.base import console, layout
from scripts.base.errors import BuildError, UsageError
from scripts.series import clone
from scripts.source import kernel_set
from scripts.wheels.cluster import dispatch, work_list
from scripts.wheels.compiling import kernels
from scripts.wheels.toolchain import compilers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distributed import Client

    from scripts.series.tree import Tree
    from scripts.source.matrix import Matrix
    from scripts.wheels.building.build import BuildOptions, Place
    from scripts.wheels.building.jobs import Job


def shares_of(
    loaded: Matrix, jobs: Sequence[Job], applied: Tree, place: Place
) -> tuple[dict[Job, work_list.Share], dict[Job, BuildError]]:
    """What each job has compiled, and the jobs whose toolchain cannot be had here."""
    found: dict[tuple[str, str | None], compilers.Toolchain] = {}
    shares: dict[Job, work_list.Share] = {}
    failed: dict[Job, BuildError] = {}
    for job in jobs:
        cuda = (job.target.cuda, job.target.toolkit)
        try:
            if cuda not in found:
                found[cuda] = compilers.assemble(job.target, None, layout.BUILD, cache=place.cache)
        except BuildError as e:
            failed[job] = e
            continue
        plan = kernels.Plan(
            applied, found[cuda], job.kernels, job.architectures, place.build, shared_ptx=loaded.shared_ptx
        )
        shares[job] = work_list.Share(plan, tuple(kernels.kernel_units(plan)), job.target)
    return shares, failed


def compile_for(
    loaded: Matrix, jobs: Sequence[Job], options: BuildOptions, place: Place, client: Client
) -> dict[Job, BuildError]:
    """Have the kernel files of all jobs compiled, those of several once.

    Returns:
        The jobs that cannot be built, and why. One job alone raises it.
    """
    if options.stock:
        raise UsageError(
            "--stock compiles against torch, which workers need not have; leave out --scheduler."
        )
    _, applied = clone.apply(loaded, options.source)
    kernel_set.require_known(applied.root)
    console.step("Kernel files on workers")
    shares, failed = shares_of(loaded, jobs, applied, place)
    if shares:
        done, by_key = dispatch.compile_on(client, [*shares.values()], options.jobs)
        taken = console.duration(done.seconds)
        console.note(
            f"{done.built} compiled in {taken}; compile caches: {done.cache_hits} hits, "
            f"{done.cache_misses} misses"
        )
        failed |= {job: by_key[key] for job, share in shares.items() if (key := share.units[0].key) in by_key}
    if len(jobs) == 1 and failed:
        raise next(iter(failed.values()))
    for job, error in failed.items():
        console.error(f"{job.target.name}: {error}")
    return failed
