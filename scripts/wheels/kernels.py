"""Compile kernel files and the binding through ninja and a compile cache, apart from each other.

A build folder is named by the digest of everything that its objects depend on, so a finished object is
never stale and an interrupted build goes on where it stopped. No path of the clone reaches a compiler: commands
run in the source tree with relative paths, and nvcc gets kernel files at a place that follows from their
content. So objects are the same wherever they are made, and one clone's compiles answer another's.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
from ninja import ninja_syntax
from packaging.version import Version

from scripts.base import console, files, layout
from scripts.base.errors import CompileError
from scripts.base.process import last_lines, quoted, run
from scripts.source.kernel_set import Pass
from scripts.source.matrix import ARCHITECTURES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from scripts.series.tree import Tree
    from scripts.source.kernel_set import Kernel
    from scripts.wheels.toolchain import Toolchain

# As upstream's setup.py has them, so that stock and patched kernels are compiled alike.
NVCC_FLAGS = (
    "-O3",
    "-std=c++17",
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "--use_fast_math",
)
CXX_FLAGS = ("-O3", "-fPIC", "-DNDEBUG", "-DTORCH_API_INCLUDE_EXTENSION_H")
# What machine code shrinks to a quarter with; an object of 13.0 asks for a driver that can unpack it anyway (R580).
_COMPRESS = ("--compress-mode=size",)
_COMPRESS_FROM = Version("13.0")
_CACHE_SHARES_FROM = Version("0.18")  # the sccache that keeps several machine targets of one PTX (its issues 2722, 2811)
_CXX20_FROM = Version("2.14")  # the torch whose headers ask for it; upstream builds with 17
# nvcc puts a hash of the source's real path, one of the working directory and its process id into the names of what is
# static in a kernel file. The first is the last path given; the seed takes the others' place. (12.4 has neither them nor a seed.)
_NAMED = "-Xcudafe=--orig_src_path_name -Xcudafe=$source"
_SEEDED = " --frandom-seed=$source"
_INCLUDES = ("csrc/flash_attn", "csrc/flash_attn/src", "csrc/cutlass/include")

# Seconds and bytes that a file of head dim 64 or 128 took on one core with nvcc 13.0 for one architecture. They
# order the files, limit the jobs and weigh the progress bar; what is built does not depend on them.
_SECONDS = {
    (Pass.FWD, False): 83,
    (Pass.FWD, True): 73,
    (Pass.SPLIT, False): 125,
    (Pass.SPLIT, True): 115,
    (Pass.BWD, False): 103,
    (Pass.BWD, True): 96,
}
_FRONT_HALF = 0.75  # of them, up to PTX
_PRIOR = 300  # seconds for which the above count when the time left is told
_BYTES = {Pass.FWD: 4.0e9, Pass.SPLIT: 4.0e9, Pass.BWD: 6.5e9}


@dataclass(frozen=True)
class Flavour:
    """The extension's name, and what tells its code from another's in the same process."""

    extension: str
    defines: tuple[str, ...] = ()
    torch_in_kernels: bool = False  # upstream's own kernel files include torch, ours do not
    stand_ins: Path | None = None  # headers in the place of torch's for CUDA
    code: tuple[str, ...] = ()  # flags for what kernels become, in the place of machine code for the plan's architectures


FORK = Flavour("flash_attn_2_cuda")
# Unpatched kernels to measure against, beside ours: its own module name and C++ namespace.
STOCK = Flavour("flash_stock_cuda", ("-DFLASH_NAMESPACE=flash_stock",), torch_in_kernels=True)


@dataclass(frozen=True)
class Plan:
    """What is compiled: a source tree into an extension."""

    tree: Tree
    toolchain: Toolchain
    kernels: tuple[Kernel, ...]
    architectures: tuple[str, ...]
    build: Path
    flavour: Flavour = FORK
    shared_ptx: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Unit:
    """One source file and the object it becomes."""

    source: str  # relative to the tree
    target: Path
    rule: str  # nvcc or cxx
    seconds: float
    memory: float
    key: str = ""  # the digest of all that the object depends on, where its place has one


@dataclass(frozen=True)
class Compiled:
    """Objects, and how many compiler calls the cache answered."""

    objects: tuple[Path, ...]
    built: int
    seconds: float
    cache_hits: int
    cache_misses: int


def seconds_expected(kernel: Kernel, architectures: Sequence[str], shared_ptx: Mapping[str, tuple[str, ...]]) -> float:
    """A guess at the CPU seconds of one kernel file."""
    front = len(front_halves(architectures, shared_ptx))
    return _SECONDS[kernel.kind, kernel.causal] * (_FRONT_HALF * front + (1 - _FRONT_HALF) * len(architectures))


def masks(kernels: Sequence[Kernel]) -> list[str]:
    """Definitions that tell the binding which kernels there are (``fork_kernel_set.h``)."""
    return [f"-DFORK_KERNELS_{kind.name}=0x{sum(1 << k.bit for k in kernels if k.kind is kind):06x}" for kind in Pass] + _without_bias(kernels)


def _without_bias(kernels: Sequence[Kernel]) -> list[str]:
    return [] if all(k.bias for k in kernels) else ["-DFORK_NO_BIAS"]


def for_gpus(architectures: Sequence[str]) -> str:
    """The definition that tells kernel files which machine code there will be, and no PTX (``fork_gpus.h``)."""
    return f"-DFORK_ARCHITECTURES=0x{sum(1 << ARCHITECTURES.index(a) for a in architectures):03x}"


def front_halves(architectures: Sequence[str], shared_ptx: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """For which compute capabilities PTX is made, and machine code for which from it.

    >>> front_halves(("80", "90", "120"), {"80": ("86", "90")})
    {'80': ('80', '90'), '120': ('120',)}
    >>> front_halves(("90",), {"80": ("86", "90")})
    {'90': ('90',)}
    """
    made: dict[str, tuple[str, ...]] = {}
    for architecture in architectures:
        base = next((b for b, others in shared_ptx.items() if architecture in (b, *others)), architecture)
        group = tuple(a for a in architectures if a in (base, *shared_ptx.get(base, ())))
        made |= {base: group} if len(group) > 1 else {architecture: (architecture,)}
    return made


def gencode(architectures: Sequence[str], shared_ptx: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Options for machine code of these compute capabilities, and no PTX."""
    return [
        f"-gencode=arch=compute_{base},code=" + (f"sm_{group[0]}" if len(group) == 1 else f"[{','.join(f'sm_{a}' for a in group)}]")
        for base, group in front_halves(architectures, shared_ptx).items()
    ]


def nvcc_flags(plan: Plan) -> list[str]:
    """The flags that decide what a kernel file becomes; they go into a wheel's provenance."""
    flags = [*NVCC_FLAGS, *_without_bias(plan.kernels)]
    if not plan.flavour.torch_in_kernels:
        flags.append(for_gpus(plan.architectures))
    if plan.flavour.code:
        return [*flags, *plan.flavour.code]
    compress = _COMPRESS if Version(plan.toolchain.toolkit.release) >= _COMPRESS_FROM else ()
    return [*flags, *compress, *gencode(plan.architectures, plan.shared_ptx)]


def job_limit(asked: int | None, largest: float) -> tuple[int, str]:
    """How many compilers may run at once, and why: by the cores, and by the memory each may need."""
    if asked is not None:
        return asked, "--jobs"
    cores = len(os.sched_getaffinity(0))
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    available = int(re.findall(r"MemAvailable:\s+(\d+) kB", meminfo)[0]) * 1024
    by_memory = max(1, int(available // largest))
    return min(cores, by_memory), f"{cores} cores, {available / 1e9:.0f} GB free for {largest / 1e9:.1f} GB a file"


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]


def _site(plan: Plan) -> str:
    """Where torch lies, as seen from the source tree."""
    return os.path.relpath(plan.toolchain.environment.site.resolve(), plan.tree.root.resolve())


def extension_key(objects: Sequence[Path], options: Sequence[str]) -> str:
    """What tells one extension from another: the linker's options, and objects, whose folders follow from their content."""
    return _digest([f"{path.parent.name}/{path.name}" for path in objects], options)


def _includes(plan: Plan, *, torch: bool) -> list[str]:
    toolchain = plan.toolchain
    folders: list[str | Path] = [*toolchain.toolkit.include]
    words = [f"-I{folder}" for folder in _INCLUDES]
    if torch:
        site, env = _site(plan), toolchain.environment
        folders = [
            f"{site}/torch/include",
            f"{site}/torch/include/torch/csrc/api/include",
            env.include,
            *folders,
            *(f"{site}/{folder.relative_to(env.site)}/include" for folder in env.cuda),
        ]
        words += [_abi(toolchain)]
    return [*words, *(word for folder in folders for word in ("-isystem", str(folder)))]  # apart: nvcc does not take them joined


def _abi(toolchain: Toolchain) -> str:
    return f"-D_GLIBCXX_USE_CXX11_ABI={int(toolchain.environment.cxx11_abi)}"


def _named(tools: Toolchain) -> str:
    return _NAMED + (_SEEDED if tools.toolkit.takes_seed else "")


def kernel_units(plan: Plan) -> list[Unit]:
    """Kernel files, longest first, in the folder of their digest: sources, compiler, flags, architectures. No Python, and no torch but in stock's."""
    tools = plan.toolchain
    torch = (tools.environment.torch, _abi(tools)) if plan.flavour.torch_in_kernels else None
    compilers = (tools.toolkit.version, tools.cxx_version)
    key = _digest(plan.tree.kernel_sources, *compilers, torch, nvcc_flags(plan), _named(tools), plan.flavour.defines)
    folder = plan.build / "kernels" / key
    units = [
        Unit(
            f"csrc/flash_attn/src/{k.source}",
            folder / f"{k.name}.o",
            "nvcc",
            seconds_expected(k, plan.architectures, plan.shared_ptx),
            _BYTES[k.kind],
            key,
        )
        for k in plan.kernels
    ]
    return sorted(units, key=lambda unit: (-unit.seconds, unit.source))


def binding_unit(plan: Plan) -> Unit:
    """``flash_api.cpp``: it alone depends on Python, torch's ABI and the choice of kernels."""
    tools = plan.toolchain
    parts = (tools.environment.torch, tools.environment.tag, _abi(tools), tools.toolkit.version, tools.cxx_version)
    flavour = plan.flavour
    others = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(flavour.stand_ins.rglob("*.h"))] if flavour.stand_ins else []
    key = _digest(plan.tree.sources, *parts, *tools.environment.pybind, CXX_FLAGS, flavour.extension, flavour.defines, masks(plan.kernels), *others)
    return Unit("csrc/flash_attn/flash_api.cpp", plan.build / "binding" / key / "flash_api.o", "cxx", 40, 2.0e9, key)


def _staged(source: Path) -> Path:
    """A copy of a kernel file at a path that follows from its content.

    nvcc hands a file's real path to each of its steps, and the compile cache takes it into the key.
    """
    text = source.read_text(encoding="utf-8")
    path = layout.cache("units") / hashlib.sha256(text.encode()).hexdigest()[:16] / source.name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{os.getpid()}-{path.name}")  # another build may write the same
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    return path


def _nvcc(plan: Plan) -> str:
    """The command for a kernel file, with ninja's variables for what differs."""
    tools = plan.toolchain
    words: list[str | Path] = [
        tools.toolkit.nvcc,
        *nvcc_flags(plan),
        f"-ccbin={tools.cxx}",
        "-Xcompiler=-fPIC",
        *plan.flavour.defines,
    ]
    words += _includes(plan, torch=plan.flavour.torch_in_kernels)
    return f"{quoted(words)} {_named(tools)} -c $staged"


def _cxx(plan: Plan) -> str:
    """The command for the binding, likewise."""
    words: list[str | Path] = [
        plan.toolchain.cxx,
        *CXX_FLAGS,
        "-std=c++20" if Version(plan.toolchain.environment.torch) >= _CXX20_FROM else "-std=c++17",
        f"-DTORCH_EXTENSION_NAME={plan.flavour.extension}",
        *masks(plan.kernels),
        *plan.flavour.defines,
        *plan.toolchain.environment.pybind,
    ]
    if plan.flavour.stand_ins:
        words.append(f"-I{os.path.relpath(plan.flavour.stand_ins, plan.tree.root)}")
    # The messages of torch's checks name its headers; where they lay is nobody's business.
    words += [*_includes(plan, torch=True), f"-ffile-prefix-map={_site(plan)}/="]
    return f"{quoted(words)} -c $source"


def _kept(plan: Plan) -> bool:
    """Whether the compile cache can keep this plan's kernel compiles: sccache runs one ptxas a PTX alone, and then misses the others' output."""
    cache = plan.toolchain.sccache
    if cache is None or plan.flavour.code or all(len(group) == 1 for group in front_halves(plan.architectures, plan.shared_ptx).values()):
        return cache is not None
    answer = run([cache, "--version"], error=CompileError, what="the compile cache does not work")
    return Version(answer.split()[1]) >= _CACHE_SHARES_FROM


Work = tuple[Plan, "Sequence[Unit]"]

# An object is kept under the digest of its sources for good, so it may not be of sources that were edited meanwhile.
# By the time of change, which a file that is moved here or copied with its own time has as well.
_UNCHANGED = "changed=$$(find csrc -type f ! -name '.*' -cnewer {seen}) && test -z \"$$changed\""

# Options that nvcc (and its nvcc.profile), g++ and ld take from the environment: they would be in no digest, and in no wheel's provenance.
HIDDEN_OPTIONS = (
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "INCLUDES", "SYSTEM_INCLUDES", "LIBRARIES"),
    *("CUDAFE_FLAGS", "NVVM_FLAGS", "PTXAS_FLAGS", "OCG_FLAGS"),
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "GCC_EXEC_PREFIX", "COMPILER_PATH", "LIBRARY_PATH", "LD_RUN_PATH"),
)


def write_ninja(path: Path, work: Sequence[Work]) -> None:
    """The rules that make objects, as ninja reads them; it starts each plan's units in their order, side by side."""
    commands = {"nvcc": _nvcc, "cxx": _cxx}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        writer = ninja_syntax.Writer(cast("Any", file), width=10**6)  # annotated as str, used as a file
        for at, (plan, units) in enumerate(work):
            launcher = f"{quoted([plan.toolchain.sccache])} " if plan.toolchain.sccache else ""
            kept = _kept(plan)
            seen = path.with_name(f"{path.name}.{at}.seen")
            seen.touch()
            os.utime(seen, ns=(plan.tree.seen, plan.tree.seen))
            for rule in sorted({unit.rule for unit in units}):
                # An object appears whole or not at all. A generator's object is not made again when its command line
                # changes: all that matters is in the folder's name, and with or without the cache it is the same.
                cached = launcher if rule != "nvcc" or kept else ""
                compile_it = f"cd {quoted([plan.tree.root])} && {cached}{commands[rule](plan)} -o $out.part"
                steps = f"{compile_it} && {_UNCHANGED.format(seen=quoted([seen]))} && mv $out.part $out"
                writer.rule(f"{rule}{at}", command=steps, description="$source", generator=True)
        placed = [(place, at, unit) for at, (_, units) in enumerate(work) for place, unit in enumerate(units)]
        made: set[Path] = set()
        for _, at, unit in sorted(placed, key=lambda one: one[:2]):
            if unit.target in made:  # plans that do not differ in what it depends on
                continue
            made.add(unit.target)
            # The tree's content is in the folder's name, so no dependency file is needed.
            staged = _staged(work[at][0].tree.root / unit.source) if unit.rule == "nvcc" else unit.source
            writer.build([str(unit.target)], f"{unit.rule}{at}", variables={"source": unit.source, "staged": quoted([staged])})


def environment() -> dict[str, str]:
    """The environment of compilers, and of the cache that starts them."""
    return {name: value for name, value in os.environ.items() if name not in HIDDEN_OPTIONS}


def _end_tree(pid: int) -> None:
    """End a process and all that it started; the server starts compilers in sessions of their own."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        root.suspend()  # so that it starts nothing more
        tree = [*root.children(recursive=True), root]
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(tree[:-1], timeout=10)


@contextmanager
def _cache_server(toolchain: Toolchain, root: Path, log: Path) -> Iterator[dict[str, str]]:
    """A compile cache server of our own: one already running keeps its settings, and ours ends with us.

    The compilers are the server's children; they end when the block is left.
    """
    if toolchain.sccache is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="fa2-sccache-") as folder, log.open("w", encoding="utf-8") as messages:
        socket = Path(folder) / "socket"
        env = {
            "SCCACHE_SERVER_UDS": str(socket),
            # Keeps the clone's path out of the preprocessed text; nvcc's later steps still have it in their key.
            "SCCACHE_BASEDIRS": str(root),
            "SCCACHE_IDLE_TIMEOUT": "0",
        }
        foreground = {**environment(), **env, "SCCACHE_START_SERVER": "1", "SCCACHE_NO_DAEMON": "1"}
        server = subprocess.Popen([str(toolchain.sccache)], env=foreground, stdout=messages, stderr=messages, start_new_session=True)
        try:
            deadline = time.monotonic() + 30
            while not socket.exists():
                if server.poll() is not None or time.monotonic() > deadline:
                    raise CompileError(
                        f"the compile cache did not start:\n{last_lines(log.read_text(encoding='utf-8'))}\n"
                        f"The full log is {log}. Build with --no-cache to go without."
                    )
                time.sleep(0.02)
            yield env
        finally:
            # An entry is written aside and renamed, so ending the server damages none.
            _end_tree(server.pid)
            server.wait()


@dataclass(frozen=True)
class _CacheStats:
    hits: int = 0
    misses: int = 0
    refused: tuple[str, ...] = ()  # why calls could not be cached at all
    location: str = ""
    version: str = ""


def _cache_stats(toolchain: Toolchain, env: dict[str, str]) -> _CacheStats:
    if toolchain.sccache is None:
        return _CacheStats()
    command = [str(toolchain.sccache), "--show-stats", "--stats-format=json"]
    deadline = time.monotonic() + 10
    while True:
        shown = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
        if shown.returncode != 0:
            return _CacheStats()
        answer = json.loads(shown.stdout)
        stats = answer["stats"]
        hits, misses = (sum(stats[name]["counts"].values()) for name in ("cache_hits", "cache_misses"))
        # What was compiled is written after the compiler's answer was passed on; the server must live until then.
        if stats["cache_writes"] + stats["cache_write_errors"] >= misses or time.monotonic() > deadline:
            return _CacheStats(hits, misses, tuple(stats["not_cached"]), answer["cache_location"], answer["version"])
        time.sleep(0.05)


def _check_cache(stats: _CacheStats, tools: Toolchain, units: Sequence[Unit]) -> None:
    """A cache that does not answer costs hours and says nothing; so we do.

    Raises:
        CompileError: a call that the cache refuses, or not one answered of kernel files that went through this cache before.
            (The binding misses it rightly when Python's headers lie elsewhere.)
    """
    if stats.refused:
        raise CompileError(
            f"the compile cache could not keep some calls: {', '.join(stats.refused)}. Those are options in scripts/wheels/kernels.py "
            "that it does not know what to do with. The objects are kept; --no-cache builds without."
        )
    # With compilers elsewhere, or another sccache, it misses rightly.
    place = _digest(stats.location, stats.version, tools.toolkit.nvcc, tools.cxx)
    marks = [layout.cache("compiled") / place / f"{unit.key}-{unit.target.stem}" for unit in units if unit.key and unit.rule == "nvcc"]
    seen = [mark.stat().st_mtime for mark in marks if mark.exists()]
    for mark in marks:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    if seen and not stats.hits and "SCCACHE_RECACHE" not in os.environ and _has_entry_before(stats.location, max(seen)):
        raise CompileError(
            f"the compile cache ({stats.location}) answered none of {stats.misses} calls, though {len(seen)} of these files went through it before. "
            "Either it is too small and dropped them (SCCACHE_CACHE_SIZE), or the commands differ from run to run, which is a fault of "
            "scripts/wheels/kernels.py. The objects are kept: the same command now goes on with them."
        )


def _has_entry_before(location: str, moment: float) -> bool:
    """Whether a cache still has anything from before; one that was emptied since cannot answer. True of a cache that is no folder here."""
    folder = re.search(r'"(.+)"', location)
    if folder is None:
        return True
    return any(path.is_file() and path.stat().st_mtime <= moment for path in Path(folder[1]).rglob("*"))


@contextmanager
def running_ninja(command: list[str], env: dict[str, str], log: Path, units: Sequence[Unit] = ()) -> Iterator[subprocess.Popen[str]]:
    """A ninja run in a process group of its own: Ctrl-C reaches it through us alone, once.

    However the block is left, ninja and its compilers have ended and nothing half-written is left.
    """
    with log.open("w", encoding="utf-8") as file:
        file.write(f"$ {quoted(command)}\n")
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # SIGINT may be ignored by what runs below it
                process.wait()
            for unit in units:
                unit.target.with_name(unit.target.name + ".part").unlink(missing_ok=True)


def compile_units(plan: Plan, units: Sequence[Unit], jobs: int | None) -> Compiled:
    """Compile what is not there yet; see :func:`compile_together`."""
    return compile_together([(plan, units)], jobs)


def compile_together(work: Sequence[Work], jobs: int | None) -> Compiled:
    """Compile what is not there yet of several plans, whose toolchain and build folder are one.

    Returns:
        The objects, plan after plan, each in the order of its units; one that several plans have is there once.

    Raises:
        CompileError: with the failed command, the end of its output, and where the whole log is.
        SeriesError: sources changed meanwhile.
        KeyboardInterrupt: after the compilers were stopped; what was finished stays for the next run.
    """
    with files.in_turn(work[0][0].build / "compile.lock", "compiles in this clone"):
        return _compile_together(work, jobs)


def _compile_together(work: Sequence[Work], jobs: int | None) -> Compiled:
    plan, units = work[0][0], list({unit.target: unit for _, some in work for unit in some}.values())
    toolchain = plan.toolchain
    objects = tuple(unit.target for unit in units)
    for unit in units:
        unit.target.parent.mkdir(parents=True, exist_ok=True)
    logs = plan.build / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    stamp = _digest([str(o) for o in objects])
    ninja_file, log = plan.build / "ninja" / stamp / "build.ninja", logs / f"compile-{stamp}.log"
    write_ninja(ninja_file, work)
    limit, reason = job_limit(jobs, max(unit.memory for unit in units))
    by_source = {unit.source: unit for unit in units}
    started = time.monotonic()
    pending = [unit for unit in units if not unit.target.exists()]
    if pending:
        console.note(f"{len(pending)} of {len(units)} files to compile, {limit} at once ({reason}); log: {log}")
    left = sum(unit.seconds for unit in units)
    work_done = 0.0
    finished = 0
    command = [str(toolchain.ninja), "-C", str(ninja_file.parent), f"-j{limit}"]
    left -= sum(unit.seconds for unit in units if unit not in pending)
    tail: list[str] = []
    with (
        _cache_server(toolchain, plan.build.parent, logs / f"cache-{stamp}.log") as cache,
        console.progress("compiling", len(units), len(units) - len(pending)) as advance,
    ):
        env = {**environment(), **cache, "NINJA_STATUS": "[%f/%t] ", "TERM": "dumb"}
        with running_ninja(command, env, log, units) as ninja, log.open("a", encoding="utf-8") as record:
            for line in ninja.stdout or ():
                record.write(line)
                tail.append(line.rstrip("\n"))
                match = re.match(r"\[\d+/\d+\] (.+)$", line)
                if not match or match[1] not in by_source:
                    continue
                unit = by_source[match[1]]
                finished += 1
                work_done += unit.seconds
                left -= unit.seconds
                # Before much is done the rate is what the files were seen to take, one job a core.
                rate = (work_done + _PRIOR * limit) / (time.monotonic() - started + _PRIOR)
                advance(Path(unit.source).name, left / rate)
            status = ninja.wait()
        stats = _cache_stats(toolchain, cache) if status == 0 else _CacheStats()
    if status != 0:
        for one, _ in work:
            one.tree.check_unchanged()
        raise CompileError(_failure(tail, log, status))
    if pending and all(_kept(one) for one, _ in work):
        _check_cache(stats, toolchain, pending)
    return Compiled(objects, finished, time.monotonic() - started, stats.hits, stats.misses)


def _failure(lines: list[str], log: Path, status: int) -> str:
    """The first failed command and the end of what it said."""
    at = next((i for i, line in enumerate(lines) if line.startswith("FAILED:")), None)
    if at is None:
        return f"ninja exited with {status}.\n{last_lines(chr(10).join(lines))}\nThe full log is {log}."
    command = lines[at + 1] if at + 1 < len(lines) else ""
    output = []
    for line in lines[at + 2 :]:
        if re.match(r"\[\d+/\d+\] |ninja: |FAILED:", line):
            break
        output.append(line)
    text = "\n".join(output)
    hint = "An error in a patched header shows here first: look at the line above, in the patch that touches the file."
    if re.search(r"Killed|Cannot allocate memory|out of memory|signal 9", text):
        hint = "The compiler ran out of memory: try fewer at once (--jobs 1)."
    elif "No space left" in text:
        hint = "The disk is full: free some space and run the same command again; what was compiled is kept."
    return f"{lines[at].removeprefix('FAILED: ').strip()} failed:\n  {command}\n{last_lines(text)}\nThe full log is {log}. {hint}"
