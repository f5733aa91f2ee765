"""What a wheel says of itself, in METADATA, WHEEL and _fork.json; installed, or a file."""

import json
import re
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

EXTENSION = "flash_attn_2_cuda"
LIBRARY = "flash_attn/cpp/lib/libflash_attention_v2.so.1"  # that it calls
Numbers = Tuple[int, ...]


def numbers(version: str) -> Numbers:
    """The numbers that a version begins with: (2, 8, 3) of 2.8.3.post1."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def major(version: Optional[str]) -> Optional[int]:
    """The first number of a version; None for none."""
    return (numbers(version) or (None,))[0] if version else None


def fits(version: str, specifier: str) -> bool:
    """Whether a release is in a range such as ``>=2.10,<3`` or ``==2.11.*``. rc1 and such do not count."""
    return all(_fits(numbers(version), part.strip()) for part in specifier.split(",") if part.strip())


def _fits(have: Numbers, part: str) -> bool:
    match = re.match(r"(===|==|!=|~=|<=|>=|<|>)\s*(.+)", part)
    if not match:
        return True
    sign, limit = match.groups()
    want = numbers(limit)
    if limit.endswith(".*") or sign == "~=":
        prefix = want if limit.endswith(".*") else want[:-1]
        same = have[: len(prefix)] == prefix
        return same != (sign == "!=") and (sign != "~=" or have >= want)
    size = max(len(have), len(want))
    a, b = (tuple(v) + (0,) * (size - len(v)) for v in (have, want))
    return {"<": a < b, ">": a > b, "<=": a <= b, ">=": a >= b, "!=": a != b}.get(sign, a == b)


class Wheel:
    """A wheel's facts; installed, or a file."""

    def __init__(self, place: Path, metadata: str, tags: str, provenance: Dict[str, Any], needs: str) -> None:
        told = Parser().parsestr(metadata)
        self.place, self.name, self.version = place, str(told["Name"]), str(told["Version"])
        self.requires_python = told["Requires-Python"] or ""
        self.requires = [str(line) for line in told.get_all("Requires-Dist", []) if "extra" not in line]
        self.tags = [str(tag) for tag in Parser().parsestr(tags).get_all("Tag", [])]
        self.cuda = provenance.get("cuda") or ""
        self.torch = provenance.get("torch") or ""
        self.architectures = [str(a) for a in provenance.get("architectures", [])]
        self.kernels = [str(k) for k in provenance.get("kernel_set", [])]
        self.flags = [str(f) for f in provenance.get("nvcc", {}).get("flags", [])]
        self.glibc = needs  # that its extension needs

    def requirement(self, name: str) -> str:
        """The range of versions that it asks for; empty for any."""
        return dict(requirements(self)).get(name, "")

    def head_dims(self, kind: str = "fwd") -> List[int]:
        """Those that it has kernels for: of fwd, split or bwd."""
        found = {re.match(kind + r"_hdim(\d+)_", kernel) for kernel in self.kernels}
        return sorted({int(match.group(1)) for match in found if match})

    def as_data(self) -> Dict[str, Any]:
        """For JSON."""
        keys = ("name", "version", "requires_python", "requires", "tags", "cuda", "architectures", "glibc")
        return {
            "place": str(self.place),
            **{k: getattr(self, k) for k in keys},
            "head_dims": self.head_dims(),
        }


def requirements(wheel: Wheel) -> Iterator[Tuple[str, str]]:
    """Names of the packages that it always needs, each with its range of versions."""
    for line in wheel.requires:
        match = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*\(?([^;)]*)", line)
        if match and ";" not in line:
            yield normal(match.group(1)), match.group(2).strip()


def normal(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _glibc(content: bytes) -> str:
    """The glibc that libraries need: the latest version that they name."""
    found = {tuple(map(int, v.split(b"."))) for v in re.findall(rb"GLIBC_(2\.\d{1,2})\0", content)}
    return ".".join(map(str, max(found))) if found else ""


def of_file(path: Path) -> Optional[Wheel]:
    """The wheel in a file; None for one that is not of this project."""
    with zipfile.ZipFile(str(path)) as archive:
        names = archive.namelist()
        info = [n for n in names if re.match(r"[^/]+\.dist-info/METADATA$", n)]
        if "flash_attn/_fork.json" not in names or not info:
            return None
        metadata, tags, provenance = (
            archive.read(n).decode("utf-8")
            for n in (info[0], info[0].replace("/METADATA", "/WHEEL"), "flash_attn/_fork.json")
        )
        libraries = [n for n in names if (n.startswith(EXTENSION) and n.endswith(".so")) or n == LIBRARY]
        needs = _glibc(b"".join(archive.read(n) for n in libraries))
    return Wheel(path, metadata, tags, json.loads(provenance), needs)


def of_folder(root: Path, info: Path) -> Wheel:
    """The wheel that was installed into a folder."""
    try:
        provenance = json.loads((root / "flash_attn/_fork.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        provenance = {}
    libraries = [path for path in (extension(root), root / LIBRARY) if path and ".so" in path.name]
    needs = _glibc(b"".join(path.read_bytes() for path in libraries if path.is_file()))
    return Wheel(root, text_of(info / "METADATA"), text_of(info / "WHEEL"), provenance, needs)


def text_of(path: Path) -> str:
    """What a file says; nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def extension(root: Path) -> Optional[Path]:
    """Where Python would find the extension in a folder: its library, or a package's first file."""
    package = root / EXTENSION / "__init__.py"
    if package.is_file():
        return next(iter(sorted(package.parent.glob("*.so"))), package)
    return next(iter(sorted(root.glob(EXTENSION + ".*so"))), None)
