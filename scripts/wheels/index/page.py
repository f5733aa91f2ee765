"""The index's page for people: pick a GPU, a CUDA, a torch and a package; or read the table.

One file without external requests. Without JavaScript the table says the same.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from scripts.base.errors import ToolchainError
from scripts.wheels.index import page_choices
from scripts.wheels.index.installers import FILES, VARIANTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import jinja2

    from scripts.wheels.index.page_choices import Choices
    from scripts.wheels.index.wheel_entries import Entry


def templates() -> jinja2.Environment:
    """The environment that renders the pages: text from wheels is escaped.

    Raises:
        ToolchainError: jinja2 is not installed.
    """
    try:
        import jinja2  # noqa: PLC0415 - needed for this alone
    except ImportError:
        raise ToolchainError("jinja2 is missing: pip install jinja2, or run nox -s index.") from None
    return jinja2.Environment(
        loader=jinja2.PackageLoader("scripts.wheels.index", "pages"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(groups: Mapping[str, tuple[Entry, ...]], torch_cuda: Mapping[str, str], url: str) -> str:
    """The page.

    Args:
        groups: the entries of each distribution.
        torch_cuda: the CUDA that each release of torch on the package index is built for.
        url: the index's address, with a slash at its end; empty: the page's script finds out.
    """
    entries = [entry for group in groups.values() for entry in group]
    rows = [_row(entry, groups[entry.wheel.name], url) for entry in entries]
    wheels = {
        row["file"]: {
            "row": place,
            "words": f"Python {row['python']}, {row['size']}, {row['proof']['words']}",
        }
        for place, row in enumerate(rows, 1)
    }
    offered = page_choices.choices(entries, torch_cuda)
    answers = _answers(groups, offered, torch_cuda, url)
    return (
        templates()
        .get_template("page.html")
        .render(
            choices=offered,
            first=_first(answers, offered),
            rows=rows,
            data=dumped({"place": "" if url else page_choices.PLACE, "answers": answers, "wheels": wheels}),
            place=url or page_choices.PLACE,
            has_variants=any(entry.variant for entry in entries),
        )
    )


def _answers(
    groups: Mapping[str, tuple[Entry, ...]], offered: Choices, torch_cuda: Mapping[str, str], url: str
) -> dict[str, Any]:
    """By ``GPU|CUDA|torch|package``: offers, or why there is none."""
    answers: dict[str, Any] = {}
    for package, group in groups.items():
        for gpu in offered.gpus:
            for cuda in offered.cudas:
                for torch in offered.torches:
                    releases = [r for r in torch_cuda if r.startswith(f"{torch}.")] or [torch]
                    found = page_choices.offers(group, gpu, cuda, releases, url)
                    key = "|".join((gpu.capability, cuda, torch, package))
                    if found:
                        note = _elsewhere(torch, cuda, torch_cuda.get(releases[0]))
                        answers[key] = {"offers": [asdict(offer) for offer in found], "note": note}
                    else:
                        answers[key] = {"offers": [], "note": _why_none(group, gpu.names, cuda, torch)}
    return answers


def _elsewhere(torch: str, cuda: str, built_for: str | None) -> str:
    """What to do where PyPI's torch is for another CUDA, or for one that is not known here.

    >>> _elsewhere("2.8", "12", "12.8"), _elsewhere("any", "13", None), _elsewhere("2.8", "any", None)
    ('', '', '')
    >>> _elsewhere("2.8", "13", "12.8")
    "PyPI's torch 2.8 is built for CUDA 12.8. Install a torch 2.8 for CUDA 13 first."
    >>> _elsewhere("9.9", "13", None)
    "Which CUDA PyPI's torch 9.9 is built for is not known here. Take a torch 9.9 for CUDA 13."
    """
    if page_choices.ANY in (torch, cuda) or (built_for or "").partition(".")[0] == cuda:
        return ""
    if built_for is None:
        is_unknown = f"Which CUDA PyPI's torch {torch} is built for is not known here."
        return f"{is_unknown} Take a torch {torch} for CUDA {cuda}."
    return (
        f"PyPI's torch {torch} is built for CUDA {built_for}. Install a torch {torch} for CUDA {cuda} first."
    )


def _why_none(group: tuple[Entry, ...], gpu: str, cuda: str, torch: str) -> str:
    """What there is instead."""
    live = [entry for entry in group if entry.yanked is None]
    name = group[0].wheel.name
    if not live:
        return f"Every {name} wheel here is yanked."
    served = dict.fromkeys(gpu.names for entry in live for gpu in page_choices.gpus_of(entry))
    cudas = dict.fromkeys(entry.wheel.facts.cuda or "any CUDA" for entry in live)
    torches = dict.fromkeys(_torch(entry) for entry in live)
    return (
        f"No {name} wheel here serves {gpu} with CUDA {cuda} and torch {torch}. "
        f"There are wheels for {'; '.join(served) or 'no GPU of this list'}, with "
        f"{', '.join(c if c == 'any CUDA' else f'CUDA {c}' for c in cudas)} and "
        f"{', '.join(f'{t} torch' if t == 'any' else f'torch {t}' for t in torches)}."
    )


def _first(answers: Mapping[str, Any], offered: Choices) -> dict[str, str]:
    """What is picked when the page opens: the first choice with an offer."""
    first = next((key for key, answer in answers.items() if answer["offers"]), None)
    key = first or "|".join(
        (offered.gpus[0].capability, offered.cudas[0], offered.torches[0], offered.packages[0])
    )
    return dict(zip(("gpu", "cuda", "torch", "package"), key.split("|"), strict=True))


def _torch(entry: Entry) -> str:
    """The torch that it asks for, in words.

    As METADATA has it, but for the commonest form.
    """
    told = str(entry.wheel.torch)
    if not told:
        return "any"
    return told.removeprefix("==").removesuffix(".*")


def _python(entry: Entry) -> str:
    """The Pythons that it is for, in words."""
    if entry.wheel.pythons:
        return ", ".join(entry.wheel.pythons)
    told = entry.wheel.requires_python
    if told.startswith(">=") and "," not in told:
        return f"{told.removeprefix('>=').strip()} and later"
    return told or "any"


def size(count: int) -> str:
    """Bytes in words.

    >>> size(547637), size(8392835), size(12)
    ('548 kB', '8.4 MB', '12 B')
    """
    if count < 1000:
        return f"{count} B"
    return f"{count / 1000:.0f} kB" if count < 1_000_000 else f"{count / 1_000_000:.1f} MB"


def _proof(entry: Entry) -> dict[str, str]:
    """Where it was proved, in words, and the proof's place."""
    beside = entry.beside
    if beside.proof is None or beside.proof_file is None:
        return {"words": "no proof", "place": ""}
    place = f"{FILES}/{quote(beside.proof_file.name)}"
    if not beside.proved_on:
        return {"words": "not proved: its suite did not run whole on a GPU", "place": place}
    passed = beside.proof.counts.get("passed", 0)
    return {"words": f"proved on {beside.proved_on}, {passed} cases passed", "place": place}


def _row(entry: Entry, group: tuple[Entry, ...], url: str) -> dict[str, Any]:
    """What the table tells of one wheel."""
    wheel, facts, variant = entry.wheel, entry.wheel.facts, entry.variant
    at_first_call = not facts.architectures
    return {
        "package": wheel.name,
        "version": str(wheel.version),
        "file": entry.file,
        "place": f"{FILES}/{quote(entry.file)}",
        "size": size(wheel.size),
        "sha256": wheel.sha256,
        "gpus": [f"{gpu.names} ({gpu.capability})" for gpu in page_choices.gpus_of(entry)],
        "at_first_call": at_first_call,
        "cuda": facts.cuda or "any",
        "torch": _torch(entry),
        "python": _python(entry),
        "yanked": entry.yanked,
        "proof": _proof(entry),
        "others": [{"name": p.name, "place": f"{FILES}/{quote(p.name)}"} for p in entry.beside.others],
        "lines": asdict(page_choices.lines(entry, group, facts.cuda_major, url)),
        "variant": {"label": variant.label, "place": f"{VARIANTS}/{quote(variant.path.name)}"}
        if variant
        else None,
    }


def dumped(data: Any) -> str:
    """JSON that may stand in a script element: nothing in it ends the element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
