"""``nox -s index``: which wheels it takes, what its pages say, and how it is replaced and checked."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import __main__
from scripts.base.errors import BuildError, MatrixError, UsageError, WheelError
from scripts.base.fetch import sha256
from scripts.source import gpus, matrix_tables
from scripts.wheels.index import reading, static_index, wheel_entries, yanked_list
from scripts.wheels.proof import origin, verify
from scripts.wheels.trust import contents, evidence
from tests.unit.conftest import Command, Ended
from tests.unit.index_wheels import CUDA, PYTHON, make, prove, upstream


def page(out: Path, name: str = "flash-attn") -> Any:
    return json.loads((out / "simple" / name / "index.json").read_text())


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# What a wheel says in one place and not in another; each is refused with both.
DISAGREEMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "version": (
        {"file": f"flash_attn-2.8.4-{CUDA['build']}-{CUDA['tag']}.whl"},
        f"the version by its file name is 2.8.4, and what is in it says {re.escape(CUDA['version'])}",
    ),
    "name": (
        {"change": lambda e: _replace(e, "METADATA", b"Name: flash_attn", b"Name: flash_attn_4")},
        "the name by its file name is flash-attn, and what is in it says flash-attn-4",
    ),
    "metadata's version": (
        {"change": lambda e: _replace(e, "METADATA", b"cu13\n", b"cu12\n")},
        r"the version by its file name is .*cu13, and what is in it says .*cu12",
    ),
    "python": (
        {"file": f"flash_attn-{CUDA['version']}-{CUDA['build']}-cp313-cp313-linux_x86_64.whl"},
        r"the tags by its file name is \['cp313-cp313-linux_x86_64'\]",
    ),
    "requires-python": (
        {"tag": "cp312-cp312-linux_x86_64", "python": "==3.13.*"},
        "Python 3.12, METADATA says Requires-Python: ==3.13",
    ),
    "build tag": (
        {"file": f"flash_attn-{CUDA['version']}-9_x-{CUDA['tag']}.whl"},
        "the build tag by its file name is 9_x, and what is in it says 24_hdim64_sm90",
    ),
    "architectures": ({"facts": {"architectures": ["80", "90"]}}, "architectures 90, _fork.json says 80, 90"),
    "cuda": ({"facts": {"cuda": "12.8"}}, "the label says CUDA cu13, _fork.json says 12.8"),
    "no cuda": ({"facts": {"cuda": "", "torch": ""}}, "the label says CUDA cu13, _fork.json says none"),
    "cuda's minor release": (
        {"version": "2.8.3.post1+det.2.cu130"},
        "the label says CUDA cu130, _fork.json says 13.0",
    ),
    "no label": ({"version": "2.8.3.post1"}, r"the label \(none\) does not begin with det.2, as _fork.json"),
    "torch": ({"facts": {"torch": "2.9.1"}}, r"METADATA asks for torch>=2.10, _fork.json says torch 2.9.1"),
    "no torch": ({"requires": ()}, "METADATA asks for no torch, _fork.json says torch 2.11.0"),
    "what is asked for": ({"requires": ("torch=2.10",)}, "METADATA: Expected semicolon"),
    "revision": ({"facts": {"fork_revision": 1}}, "does not begin with det.1, as _fork.json says"),
    "upstream": (
        {"facts": upstream("2.8.3.post2")},
        "the version is 2.8.3.post1, _fork.json says upstream's is 2.8.3.post2",
    ),
    "commit": (
        {"facts": upstream("2.8.3.post1+g0251105a")},
        "does not name upstream's commit g0251105a",
    ),
}


def _replace(entries: dict[str, bytes], file: str, old: bytes, new: bytes) -> None:
    (name,) = [name for name in entries if name.endswith(file)]
    assert old in entries[name]
    entries[name] = entries[name].replace(old, new)


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_a_wheel_whose_name_metadata_and_label_disagree_is_refused(tmp_path: Path, what: str) -> None:
    values, message = DISAGREEMENTS[what]
    path = make(tmp_path, **values)
    with pytest.raises(WheelError, match=message) as raised:
        reading.read(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"version": "2.8.3+det.2.of.2.8.3.post1.cu13"},
        {"version": "2.8.4.dev0+det.2.g0251105a.cu13", "facts": upstream("2.8.4.dev0+g0251105a")},
        {"build": "", "tag": "cp312-abi3-linux_x86_64", "python": ">=3.12,!=3.12.0"},
    ],
)
def test_a_wheel_that_agrees_is_taken_whatever_the_shape_of_its_name(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    wheel = reading.read(make(tmp_path, **values))
    assert (wheel.name, wheel.facts.cuda, wheel.facts.architectures) == ("flash-attn", "13.0", ("90",))


def files_in(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def repacked(path: Path, change: Any) -> None:
    """The wheel with other files, and RECORD as it was; each entry's CRC fits."""
    entries = files_in(path)
    change(entries)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: _replace(e, "here.py", b"tag", b"tug"), "here.py was changed"),
        (lambda e: _replace(e, "_fork.json", b"2.11.0", b"2.11.1"), "_fork.json was changed"),
        (lambda e: e.update({"flash_attn/more.py": b""}), "more.py was added"),
        (lambda e: e.pop("flash_attn/here.py"), "here.py was removed"),
        (lambda e: _replace(e, "RECORD", b",sha256", b";sha256"), "is no row of three fields"),
    ],
)
def test_a_wheel_with_a_file_changed_added_or_gone_is_refused_by_that_file(
    tmp_path: Path, change: Any, message: str
) -> None:
    path = make(tmp_path)
    repacked(path, change)
    with pytest.raises(WheelError, match=message):
        reading.read(path)


def test_what_is_no_wheel_of_this_project_is_refused(tmp_path: Path, dist: Path) -> None:
    for name, content in (("numpy-2.0.whl", b""), ("flash_attn-1-py3-none-any.whl", b"PK")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(WheelError, match=name):
            reading.read(tmp_path / name)
    foreign = make(dist, PYTHON, change=lambda e: e.pop("flash_attn/cute/_fork.json"), file="")
    with pytest.raises(WheelError, match=r"not a wheel of this project: it has 0 files _fork\.json"):
        wheel_entries.read(dist, None)
    foreign.unlink()
    with pytest.raises(UsageError, match="has no wheels; build one"):
        wheel_entries.read(tmp_path / "none", None)


def test_pages_have_hashes_sizes_pythons_and_metadata_beside_each_wheel(dist: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    static_index.write(static_index.Request(dist), out)
    told = page(out)
    (file,) = told["files"]
    wheel = out / "simple/flash-attn" / file["url"].replace("%2B", "+")
    assert (told["name"], told["versions"]) == ("flash-attn", [CUDA["version"]])
    assert file["hashes"] == {"sha256": sha256(wheel)}
    assert (file["size"], file["requires-python"]) == (wheel.stat().st_size, ">=3.10")
    metadata = wheel.with_name(f"{wheel.name}.metadata").read_bytes()
    assert metadata.startswith(b"Metadata-Version: 2.4\nName: flash_attn\n")
    assert file["core-metadata"] == {"sha256": hashlib.sha256(metadata).hexdigest()}
    assert "dist-info-metadata" not in file, "pip 23.0 fails on a hash there"
    html = (out / "simple/flash-attn/index.html").read_text()
    assert f"#sha256={sha256(wheel)}" in html
    assert 'data-requires-python="&gt;=3.10"' in html
    assert html.count(hashlib.sha256(metadata).hexdigest()) == 2
    assert [p["name"] for p in json.loads((out / "simple/index.json").read_text())["projects"]] == [
        "flash-attn",
        "flash-attn-4",
    ]
    assert "&gt;=3.10" in (out / "simple/flash-attn-4/index.html").read_text()


def test_there_is_no_source_distribution_in_it(dist: Path, tmp_path: Path) -> None:
    (dist / "flash_attn-2.8.3.post1.tar.gz").write_bytes(b"")
    static_index.write(static_index.Request(dist), tmp_path / "out")
    assert not [name for name in files_of(tmp_path / "out") if "tar.gz" in name]


def test_yanked_wheels_say_why(dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = next(dist.glob("flash_attn-*.whl"))
    listed = tmp_path / yanked_list.FILE
    listed.write_text(f'format = 1\n[wheels]\n"{wheel.name}" = "wrong <bits>"\n"gone.whl" = "old"\n')
    static_index.write(static_index.Request(dist, yanked=listed), tmp_path / "out")
    assert page(tmp_path / "out")["files"][0]["yanked"] == "wrong <bits>"
    assert 'data-yanked="wrong &lt;bits&gt;"' in (tmp_path / "out/simple/flash-attn/index.html").read_text()
    assert "gone.whl is not in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[wheels]\n", r'yanked.toml:1: format: .*missing; begin the file with "format = 1"'),
        ("format = 2\n", r"yanked.toml:1: format: "),
        ('format = 1\n[wheels]\n"a.whl" = 1\n', r"yanked.toml:3: wheels.a.whl: .*number 1"),
        ('format = 1\n[wheels]\n"a.whl" = ""\n', r"yanked.toml:3: wheels.a.whl: "),
        ("format = 1\n[wheel]\n", r"yanked.toml:2: wheel: unknown key; allowed are format, wheels"),
        ("format =", "yanked.toml: not TOML"),
    ],
)
def test_a_wrong_list_of_yanked_wheels_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / yanked_list.FILE
    path.write_text(text)
    with pytest.raises((MatrixError, UsageError), match=message):
        yanked_list.read(path)
    with pytest.raises(UsageError, match="No such file"):
        yanked_list.read(tmp_path / "none.toml")


def test_proofs_and_attestations_lie_beside_wheels_and_are_linked(dist: Path, tmp_path: Path) -> None:
    wheel = next(dist.glob("flash_attn-*.whl"))
    prove(wheel, sha256=sha256(wheel))
    statement = dist / f"{wheel.stem}.provenance.json"
    statement.write_text("{}")
    signed = {"version": 1, "verification_material": {}, "envelope": {"statement": "e30="}}
    attestation = dist / f"{wheel.name}.slsa.attestation"
    attestation.write_text(json.dumps(signed))
    (dist / f"{wheel.name}.part").write_text("half")
    out, url = tmp_path / "out", "https://wheels.example.org/"
    (entry, _) = static_index.write(static_index.Request(dist, url=url), out)
    assert entry.beside.proved_on == "NVIDIA H100 (9.0)"
    beside = {name for name in files_of(out / "files") if name.startswith("flash_attn-")}
    proof, provenance = wheel.with_suffix(".proof.json").name, f"{wheel.name}.provenance"
    taken = {wheel.name, proof, statement.name, attestation.name}
    assert beside == {*taken, f"{wheel.name}.metadata", provenance}
    told = json.loads((out / "files" / provenance).read_text())
    assert told == {
        "version": 1,
        "attestation_bundles": [{"publisher": {"kind": "unknown"}, "attestations": [signed]}],
    }
    address = f"{url}files/{provenance.replace('+', '%2B')}"
    assert page(out)["files"][0]["provenance"] == address
    assert f'data-provenance="{address}"' in (out / "simple/flash-attn/index.html").read_text()
    html = (out / "index.html").read_text()
    for name in taken:
        assert f'href="files/{name.replace("+", "%2B")}"' in html
    static_index.write(static_index.Request(dist), out)
    assert "provenance" not in page(out)["files"][0], "its address must be whole"
    for damaged in ("{", "{}"):
        attestation.write_text(damaged)
        with pytest.raises(WheelError, match=f"{re.escape(attestation.name)} is no attestation"):
            static_index.write(static_index.Request(dist), out)


def test_a_proof_of_another_wheel_is_refused(dist: Path) -> None:
    wheel = next(dist.glob("flash_attn-*.whl"))
    proof = prove(wheel, sha256="0" * 64)
    with pytest.raises(
        WheelError, match=rf"proof.json is of another wheel \(sha256 0{{16}}…\) than {wheel.name[:9]}"
    ):
        wheel_entries.read(dist, None)
    prove(wheel, sha256=sha256(wheel))
    proof.write_text(proof.read_text().replace('"passed": 2992', '"passed": 2993'))
    with pytest.raises(WheelError, match=r"proof.json was changed: its digest is not that of what it says"):
        wheel_entries.read(dist, None)
    proof.rename(dist / "flash_attn-9.proof.json")
    with pytest.raises(WheelError, match=r"flash_attn-9.proof.json: its wheel is not there"):
        wheel_entries.read(dist, None)


def test_a_wheel_whose_suite_did_not_run_on_a_gpu_is_not_called_proved(dist: Path, tmp_path: Path) -> None:
    wheel = next(dist.glob("flash_attn-*.whl"))
    prove(wheel, sha256=sha256(wheel), verified=False)
    (entry, _) = static_index.write(static_index.Request(dist), tmp_path / "out")
    assert entry.beside.proved_on == ""
    assert "not proved: its suite did not run whole on a GPU" in (tmp_path / "out/index.html").read_text()


def test_an_index_is_the_same_bytes_each_time_and_a_check_names_what_differs(
    dist: Path, tmp_path: Path
) -> None:
    out, request = tmp_path / "out", static_index.Request(dist, variants=True)
    static_index.write(request, out)
    before = files_of(out)
    static_index.write(request, out)
    assert files_of(out) == before
    static_index.check(request, out)
    for name, content in before.items():
        (out / name).write_bytes(content + b" ")
        with pytest.raises(WheelError) as raised:
            static_index.check(request, out)
        assert f": {name} is changed. Write it again." in str(raised.value)
        (out / name).write_bytes(content)
    (out / "simple/index.html").unlink()
    (out / "simple/sdist.tar.gz").touch()
    with pytest.raises(WheelError, match=r"simple/index.html is missing; simple/sdist.tar.gz is too many"):
        static_index.check(request, out)
    with pytest.raises(UsageError, match="--variants; give the same options"):
        static_index.check(static_index.Request(dist), out)


def assert_each_change_is_named(out: Path, run: Callable[[], Ended]) -> None:
    """A byte of each file is changed in turn."""
    for name, content in files_of(out).items():
        (out / name).write_bytes(content.replace(b"a", b"b", 1))
        done = run()
        assert done.status == WheelError.exit_code, name
        assert name.rpartition("/")[2] in done.err, done.err
        (out / name).write_bytes(content)


@pytest.mark.parametrize("variants", [False, True])
def test_an_index_is_inspected_by_what_it_says_of_itself(
    dist: Path, tmp_path: Path, command: Command, variants: bool
) -> None:
    """It tells which file was changed, without the folder that it was made of."""
    for wheel in dist.glob("*.whl"):
        evidence.attest_build(wheel)
        prove(wheel, sha256=sha256(wheel))
    listed = tmp_path / yanked_list.FILE
    listed.write_text(f'format = 1\n[wheels]\n"{wheel.name}" = "wrong \\"bits\\""\n')
    out = tmp_path / "out"
    request = static_index.Request(
        dist, "https://a.example/", listed, variants, torch_cuda={"2.11.0": "13.0"}
    )
    static_index.write(request, out)
    shutil.rmtree(dist)
    done = command("inspect", str(out))
    assert done.status == 0, done.err
    assert "2 wheels and all that is said of them are whole" in done.out
    assert_each_change_is_named(out, lambda: command("inspect", str(out)))
    (out / "files/more.html").touch()
    assert "files/more.html is too many" in command("inspect", str(out)).err
    (tmp_path / "empty").mkdir()
    assert "about.json: No such file" in command("inspect", str(tmp_path / "empty")).err


def test_an_index_of_which_a_byte_was_changed_is_not_verified(
    dist: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its wheels are; their proofs would change it, so they are not kept."""
    out = tmp_path / "out"
    static_index.write(static_index.Request(dist), out)
    tried: list[verify.Beside] = []
    monkeypatch.setattr(origin, "check_series", lambda *_: SimpleNamespace(where="here", checkout=None))
    monkeypatch.setattr(verify, "verify", lambda *arguments: tried.append(arguments[-1]))
    done = command("verify", str(out))
    assert done.status == 0, done.err
    assert tried == [verify.Beside(keeps=False)] * len([*dist.glob("*.whl")])
    assert_each_change_is_named(out, lambda: command("verify", str(out)))
    assert command("verify", "--attest", str(out)).status == UsageError.exit_code


def test_whoever_reads_it_sees_the_old_index_or_the_new_one(
    dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "site" / "out"
    static_index.write(static_index.Request(dist), out)
    before = files_of(out)
    make(dist, version="2.8.3.post1+det.2.cu12", build="24_x")  # its CUDA disagrees
    with pytest.raises(WheelError):
        static_index.write(static_index.Request(dist), out)
    assert files_of(out) == before
    assert list(out.parent.iterdir()) == [out], "nothing half-written stays"


def test_a_folder_of_something_else_is_not_replaced(dist: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is no index of this command \(it has no about.json\)"):
        static_index.write(static_index.Request(dist), dist)
    assert len(list(dist.glob("*.whl"))) == 2
    (tmp_path / "empty").mkdir()
    static_index.write(static_index.Request(dist), tmp_path / "empty")
    (tmp_path / "empty/about.json").write_text('{"format": 2}')
    with pytest.raises(UsageError, match="another version of this program; move it away"):
        static_index.write(static_index.Request(dist), tmp_path / "empty")


def test_variants_are_copies_with_a_label_and_one_document_a_version(dist: Path, tmp_path: Path) -> None:
    make(dist, build="24_hdim64_sm80_sm90", facts={"architectures": ["80", "90"]})
    out = tmp_path / "out"
    static_index.write(static_index.Request(dist, variants=True), out)
    names = [file["filename"] for file in page(out)["files"]]
    version = CUDA["version"]
    assert [name for name in names if "cu13" in name.rpartition("-")[2]] == [
        f"flash_attn-{version}-24_hdim64_sm90-{CUDA['tag']}-cu13_sm90.whl",
        f"flash_attn-{version}-24_hdim64_sm80_sm90-{CUDA['tag']}-cu13_sm80_sm90.whl",
    ]
    assert names[-1] == f"flash_attn-{version}-variants.json"
    told = json.loads((out / "variants" / names[-1]).read_text())
    assert told["variants"] == {
        "cu13_sm80_sm90": {
            "nvidia": {"cuda_version_lower_bound": ["13.0"], "sm_arch": ["80_real", "90_real"]}
        },
        "cu13_sm90": {"nvidia": {"cuda_version_lower_bound": ["13.0"], "sm_arch": ["90_real"]}},
    }
    plain, copy = (
        files_in(out / folder / name) for folder, name in (("files", names[0]), ("variants", names[1]))
    )
    info = f"flash_attn-{version}.dist-info"
    told_inside = copy.pop(f"{info}/variant.json")
    assert json.loads(told_inside)["variants"] == {"cu13_sm90": told["variants"]["cu13_sm90"]}
    record = copy.pop(f"{info}/RECORD").decode()
    row = ",".join(contents.record_row(f"{info}/variant.json", told_inside))
    assert record == f"{row}\n{plain.pop(f'{info}/RECORD').decode()}"
    assert plain == copy
    assert [f["filename"] for f in page(out, "flash-attn-4")["files"]] == [
        "flash_attn_4-4.0.0b36+det.1-py3-none-any.whl"
    ]


def test_the_command_writes_checks_and_says_what_it_took(
    dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "index",
        "--wheels",
        str(dist),
        "--out",
        str(tmp_path / "out"),
        "--url",
        "https://a.example/b",
    ]
    __main__.main_inner(arguments)
    told = capsys.readouterr().out
    assert "flash_attn_4-4.0.0b36+det.1-py3-none-any.whl: " in told
    assert "not proved" in told
    assert json.loads((tmp_path / "out/about.json").read_text())["url"] == "https://a.example/b/"
    __main__.main_inner([*arguments, "--check"])
    assert "byte for byte" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "out/files")
    with pytest.raises(BuildError, match="is missing"):
        __main__.main_inner([*arguments, "--check"])
    for wrong in (
        ["--url", "wheels"],
        ["--url", "https://a/?b"],
        ["--url", "ftp://a/"],
        ["--serve", "70000"],
        ["--serve", "x"],
    ):
        with pytest.raises(SystemExit):
            __main__.main_inner([*arguments[:5], *wrong])


def test_every_gpu_of_an_x86_machine_is_offered() -> None:
    arm = {"87", "110", "121"}  # Jetson Orin, Jetson Thor, DGX Spark
    assert {gpu.architecture for gpu in gpus.GPUS} == {*matrix_tables.ARCHITECTURES} - arm
