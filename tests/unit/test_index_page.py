"""The index's page: valid HTML, labels, a table that is whole; and what it answers to each choice.

``tests/integration/test_index_in_browser.py`` looks at it in a browser.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import html5lib
import pytest

from scripts.base import sealed
from scripts.base.errors import WheelError
from scripts.base.fetch import sha256
from scripts.wheels.index import page_choices, static_index
from tests.unit.index_wheels import make, prove

TORCH_CUDA = {"2.11.0": "13.0", "2.10.0": "12.8", "2.12.1": "13.0", "2.9.1": "12.8"}
EIGHTY: Any = {"build": "24_hdim64_sm80", "facts": {"architectures": ["80"]}}


def written(dist: Path, **options: Any) -> str:
    out = dist.parent / "out"
    static_index.write(static_index.Request(dist, torch_cuda=TORCH_CUDA, **options), out)
    return (out / "index.html").read_text(encoding="utf-8")


def parsed(html: str) -> Element:
    """The document; an error of its form is one of the test."""
    tree: Element = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(html)
    return tree


def data(html: str) -> Any:
    element = parsed(html).find(".//script[@id='data']")
    assert element is not None
    return json.loads(element.text or "")


def answer(html: str, gpu: str, cuda: str, torch: str, package: str = "flash-attn") -> Any:
    return data(html)["answers"]["|".join((gpu, cuda, torch, package))]


def lines(html: str, *choice: str) -> list[dict[str, str]]:
    return [offer["lines"] for offer in answer(html, *choice)["offers"]]


def test_it_is_valid_and_asks_for_nothing_else(dist: Path) -> None:
    html = written(dist, variants=True)
    tree = parsed(html)
    for element in tree.iter():
        for name in ("src", "href"):
            assert not re.match(r"(https?:)?//", element.get(name, "")), f"{element.tag} {name}"
    assert not re.search(r"@import|url\(", html)
    assert {e.get("href") for e in tree.iter("link")} == {"data:,"}, "no request for an icon"
    policy = tree.find(".//meta[@http-equiv='Content-Security-Policy']")
    assert policy is not None
    assert (policy.get("content") or "").startswith("default-src 'none';")
    for page in (dist.parent / "out/simple").rglob("index.html"):
        parsed(page.read_text())


def test_ids_are_of_one_element_each_and_what_names_one_finds_it(dist: Path) -> None:
    tree = parsed(written(dist, variants=True))
    ids = [element.get("id") for element in tree.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    named = [e.get(key, "") for e in tree.iter() for key in ("for", "aria-labelledby") if e.get(key)]
    named += [e.get("href", "")[1:] for e in tree.iter("a") if e.get("href", "").startswith("#")]
    assert len(named) > 10
    assert set(named) <= set(ids)


def test_what_is_picked_from_has_labels(dist: Path) -> None:
    tree = parsed(written(dist))
    labelled = {label.get("for"): "".join(label.itertext()).strip() for label in tree.iter("label")}
    inputs = list(tree.iter("input"))
    assert all(labelled.get(each.get("id")) for each in inputs)
    groups = {each.get("name") for each in inputs}
    assert groups == {"gpu", "cuda", "torch", "package"}
    for group in groups:
        assert len([e for e in inputs if e.get("name") == group and e.get("checked") is not None]) == 1
    legends = ["".join(legend.itertext()) for legend in tree.iter("legend")]
    assert legends == ["Package", "GPU, by compute capability", "CUDA", "torch"]
    headings = [int(e.tag[1]) for e in tree.iter() if re.fullmatch(r"h\d", str(e.tag))]
    assert headings == [1, 2, 2, 2]
    assert tree.find("[@lang='en']") is not None or tree.get("lang") == "en"


def test_the_table_says_all_of_each_wheel_without_javascript(dist: Path) -> None:
    wheel = next(dist.glob("flash_attn-*.whl"))
    prove(wheel, sha256=sha256(wheel))
    tree = parsed(written(dist, url="https://wheels.example.org/"))
    rows = [row for row in tree.iter("tr") if row.get("id")]
    assert len(rows) == 2
    heads = ["".join(cell.itertext()) for cell in tree.iter("th") if cell.get("scope") == "col"]
    for row in rows:
        cells = row.findall("td")
        assert ["Wheel", *(cell.get("data-label") for cell in cells)] == heads
    (cuda, _) = rows
    text = " ".join("".join(cuda.itertext()).split())
    for told in (
        "flash-attn 2.8.3.post1+det.2.cu13",
        wheel.name,
        sha256(wheel),
        "H100, H200 (9.0)",
        "13.0",
        ">=2.10",
        "3.10 and later",
        " kB",
        "proved on NVIDIA H100 (9.0), 2992 cases passed",
        "pip install --only-binary flash-attn --extra-index-url https://wheels.example.org/simple/ flash-attn==",
        "uv pip install --only-binary flash-attn --index https://wheels.example.org/simple/ flash-attn==",
    ):
        assert told in text, told
    out = dist.parent / "out"
    linked = [a.get("href", "").replace("%2B", "+") for a in tree.iter("a")]
    assert f"files/{wheel.with_suffix('.proof.json').name}" in linked
    for target in linked:
        assert target.startswith("#") or (out / target).exists(), target


def test_the_form_is_hidden_until_the_script_shows_it(dist: Path) -> None:
    picker = parsed(written(dist)).find(".//section[@id='picker']")
    assert picker is not None
    assert picker.get("hidden") is not None


def test_a_choice_gives_the_lines_of_its_wheel(dist: Path) -> None:
    html = written(dist)
    (told,) = lines(html, "9.0", "13", "2.11")
    exact = "flash-attn==2.8.3.post1+det.2.cu13"
    place = f"{page_choices.PLACE}simple/"
    assert told["pip"] == f"pip install --only-binary flash-attn --extra-index-url {place} {exact}"
    assert told["uv"] == f"uv pip install --only-binary flash-attn --index {place} {exact}"
    assert told["uv_variants"] == ""
    found = answer(html, "9.0", "13", "2.11")
    assert found["note"] == ""
    (file,) = found["offers"][0]["files"]
    assert re.fullmatch(r"Python 3\.10 and later, \d kB, no proof", data(html)["wheels"][file]["words"])
    rows = {row.get("id"): "".join(row.itertext()) for row in parsed(html).iter("tr")}
    assert file in rows[f"wheel-{data(html)['wheels'][file]['row']}"]


def test_a_choice_without_a_wheel_says_what_there_is(dist: Path) -> None:
    html = written(dist)
    for choice in (("8.9", "13", "2.11"), ("9.0", "12", "2.11"), ("9.0", "13", "2.9")):
        told = answer(html, *choice)
        assert told["offers"] == []
        assert "There are wheels for H100, H200, with CUDA 13.0 and torch >=2.10." in told["note"]
    assert "serves RTX 40, L4, L40S with CUDA 13 and torch 2.11" in answer(html, "8.9", "13", "2.11")["note"]


def test_machine_code_serves_later_minor_versions_alone(dist: Path) -> None:
    make(dist, **EIGHTY)
    html = written(dist)
    assert [
        answer(html, gpu, "13", "2.11")["offers"] != [] for gpu in ("8.0", "8.6", "8.9", "9.0", "12.0")
    ] == [*(True, True, True, True, False)]


def test_wheels_of_one_version_and_python_are_told_apart_by_address(dist: Path) -> None:
    other = make(dist, **EIGHTY)
    (told,) = lines(written(dist, url="https://a.example/"), "8.6", "13", "2.11")
    place = f"https://a.example/files/{other.name.replace('+', '%2B')}#sha256={sha256(other)}"
    assert told["pip"] == f"pip install 'flash-attn @ {place}'"
    assert told["uv"] == f"uv pip install 'flash-attn @ {place}'"


def test_a_wheel_of_another_python_needs_no_address(tmp_path: Path) -> None:
    for version in ("12", "13"):
        make(tmp_path / "dist", tag=f"cp3{version}-cp3{version}-linux_x86_64", python=f"==3.{version}.*")
    (offer,) = answer(written(tmp_path / "dist"), "9.0", "13", "2.11")["offers"]
    assert [re.findall(r"cp\d+", file)[0] for file in sorted(offer["files"])] == ["cp312", "cp313"]
    assert "==2.8.3.post1+det.2" in offer["lines"]["pip"]


def test_the_newest_version_that_fits_is_offered_and_no_yanked_one(dist: Path, tmp_path: Path) -> None:
    newer = make(dist, version="2.8.3.post1+det.3.cu13", facts={"fork_revision": 3})
    assert "det.3" in lines(written(dist), "9.0", "13", "2.11")[0]["pip"]
    listed = tmp_path / "yanked.toml"
    listed.write_text(f'format = 1\n[wheels]\n"{newer.name}" = "wrong"\n')
    html = written(dist, yanked=listed)
    assert "det.2" in lines(html, "9.0", "13", "2.11")[0]["pip"]
    assert "Yanked: wrong" in html


def test_a_wheel_of_python_alone_serves_any_torch_and_cuda_and_says_where_the_mode_runs(
    dist: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    html = written(dist)
    for cuda, extra in (
        ("13", "'flash-attn-4[cu13]==4.0.0b36+det.1'"),
        ("12", "flash-attn-4==4.0.0b36+det.1"),
    ):
        (told,) = lines(html, "9.0", cuda, "2.10", "flash-attn-4")
        assert told["pip"].endswith(f"simple/ {extra}")
    assert answer(html, "9.0", "13", "2.11", "flash-attn-4")["offers"][0]["note"] == ""
    assert answer(html, "10.0", "13", "2.11", "flash-attn-4")["offers"][0]["note"] == page_choices.NO_MODE
    assert answer(html, "8.0", "13", "2.11", "flash-attn-4")["offers"] == []
    monkeypatch.setattr(page_choices, "_COMPILES", {})
    with pytest.raises(WheelError, match=r"flash_attn_4.*: nothing says which GPUs it serves.*_COMPILES"):
        written(dist)
    note = answer(html, "9.0", "12", "2.11", "flash-attn-4")["note"]
    assert note == "PyPI's torch 2.11 is built for CUDA 13.0. Install a torch 2.11 for CUDA 12 first."


def test_words_of_a_wheel_are_text_not_markup(dist: Path, tmp_path: Path) -> None:
    wheel = next(dist.glob("flash_attn-*.whl"))
    listed = tmp_path / "yanked.toml"
    listed.write_text(f'format = 1\n[wheels]\n"{wheel.name}" = "</script><b>loud</b>"\n')
    other = next(dist.glob("flash_attn_4*.whl"))
    proof = prove(other, sha256=sha256(other))  # whose words are in the script's data too
    told = json.loads(proof.read_text())
    told["gpu"]["name"] = "</script><b>loud</b>"
    proof.write_bytes(sealed.render(sealed.seal(told)))
    html = written(dist, yanked=listed)
    assert "proved on </script>" in data(html)["wheels"][other.name]["words"]
    assert "<b>" not in html
    assert parsed(html).find(".//b") is None


def test_variants_have_a_line_of_their_own(dist: Path) -> None:
    (told,) = lines(written(dist, variants=True), "9.0", "13", "2.11")
    assert told["uv_variants"].startswith("uv pip install --preview-features wheel-variants --only-binary ")
