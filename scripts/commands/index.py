"""``index``: write a static index of dist/, check one, or serve it here."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from scripts.base import console, layout
from scripts.commands import arguments
from scripts.source import matrix
from scripts.wheels.index import installers, local_server, page, static_index, yanked_list

if TYPE_CHECKING:
    from scripts.wheels.index.wheel_entries import Entry


def _address(text: str) -> str:
    """An index's address, with a slash at its end."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"{text!r} is no address such as https://wheels.example.org/fa/")
    return text.rstrip("/") + "/"


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port")
    return int(text)


def add(commands: Any) -> None:
    """The sub-parser; it sets ``run``."""
    parser = arguments.sub_parser(
        commands,
        "index",
        "Its index.html is a page where a person picks. Every wheel's name, metadata and label are compared "
        "first. Nothing is uploaded: copy the folder to any web server.",
    )
    parser.add_argument(
        "--wheels",
        metavar="FOLDER",
        type=Path,
        default=layout.DIST,
        help="of wheels and proofs (default: dist)",
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=arguments.folder,
        default=layout.BUILD / "index",
        help="where it is written (default: build/index)",
    )
    parser.add_argument(
        "--url",
        type=_address,
        help="where it will be served; the page's lines name it, and provenances are linked (default: the "
        "page finds out where it is)",
    )
    parser.add_argument(
        "--yanked",
        metavar="FILE",
        type=Path,
        help=f"a list of yanked wheels and the reasons (default: {yanked_list.FILE}, where it is there)",
    )
    parser.add_argument(
        "--variants",
        action="store_true",
        help="add a copy of each wheel as a wheel variant (draft standards), labelled by CUDA and GPUs",
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; make it again, and name each file that differs"
    )
    parser.add_argument(
        "--serve",
        metavar="PORT",
        type=_port,
        help="serve it on 127.0.0.1 afterwards, until Ctrl-C (0: a free port)",
    )
    parser.set_defaults(run=_run, interrupted="interrupted.")


def _run(options: argparse.Namespace) -> None:
    default = layout.ROOT / yanked_list.FILE
    request = static_index.Request(
        wheels=options.wheels,
        url=options.url or "",
        yanked=options.yanked or (default if default.is_file() else None),
        variants=options.variants,
        torch_cuda=matrix.load(layout.MATRIX).torch_cuda,
    )
    console.step(f"{'Checking' if options.check else 'Writing'} the index of {request.wheels}")
    _tell((static_index.check if options.check else static_index.write)(request, options.out))
    if options.check:
        console.done(f"{options.out} is the index of {request.wheels}, byte for byte.")
    else:
        console.done(
            f"{options.out / 'index.html'} is its page; installers read {options.out / installers.SIMPLE}"
        )
    if options.serve is not None:
        _serve(options.out, options.serve)


def _tell(entries: tuple[Entry, ...]) -> None:
    for entry in entries:
        proved = f"proved on {entry.beside.proved_on}" if entry.beside.proved_on else "not proved"
        told = [page.size(entry.wheel.size), proved]
        told += [f"variant {entry.variant.label}"] if entry.variant else []
        told += [f"yanked: {entry.yanked}"] if entry.yanked is not None else []
        console.note(f"{entry.file}: {', '.join(told)}")


def _serve(folder: Path, port: int) -> None:
    with local_server.server(folder, port) as server, suppress(KeyboardInterrupt):
        console.done(f"http://127.0.0.1:{server.server_port}/ serves it. Ctrl-C ends that.")
        server.serve_forever()
