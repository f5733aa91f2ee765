from __future__ import annotations

import re
from pathlib import Path


def included(path: Path, folder: Path, seen: set[Path]) -> set[str]:
    """Every header that a file includes, through the headers of its folder."""
    if path in seen:
        return set()
    seen.add(path)
    names = set(
        re.findall(r'^\s*#\s*include\s*[<"]([^">]+)[">]', path.read_text(encoding="utf-8"), re.MULTILINE)
    )
    return names.union(
        *(included(folder / name, folder, seen) for name in names if (folder / name).is_file())
    )


def test_no_kernel_file_reaches_torch(tree: Path) -> None:
    folder = tree / "csrc/flash_attn/src"
    sources = sorted(folder.glob("flash_*_sm80.cu"))
    assert len(sources) == 72
    for source in sources:
        reached = included(source, folder, set())
        assert "cuda_runtime.h" in reached, "includes are not followed"
        assert not [name for name in reached if re.match(r"(ATen|c10|torch)/", name)], source.name
