"""``edit`` and ``refresh``: change a patch where it stands, and replay the later ones on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scripts.base import console, files, layout
from scripts.base.errors import UsageError
from scripts.commands import arguments
from scripts.series import clone, edit, edit_state, places
from scripts.series.rebase import state as rebase_state

if TYPE_CHECKING:
    import argparse

    from scripts.series.places import Places


def add(commands: Any) -> None:
    """The sub-parsers; each sets ``run``."""
    interrupted = "interrupted; nox -s refresh goes on, nox -s edit -- --abort goes back."
    parser = arguments.series_parser(
        commands,
        "edit",
        "Change its files there, then nox -s refresh. Alone it says where an edit stands.",
    )
    parser.add_argument(
        "patch", metavar="PATCH", nargs="?", help="its place, a file name, or a part of its name or subject"
    )
    parser.add_argument(
        "--abort", action="store_true", help="go back to exactly what was; changes are kept as a commit"
    )
    parser.set_defaults(run=_run_edit, interrupted=interrupted)
    parser = arguments.series_parser(
        commands,
        "refresh",
        "Stops at a conflict; once it is resolved, nox -s refresh goes on.",
        needs_source=False,
    )
    parser.add_argument("--skip", action="store_true", help="leave the patch out that stopped the replay")
    parser.add_argument(
        "--use-remembered", action="store_true", help="take the resolution of the conflict that was shown"
    )
    parser.set_defaults(run=_run_refresh, interrupted=interrupted)


def _editing(place: Places) -> edit.Editing:
    if not (place.source / ".git").is_dir():
        raise UsageError(f"{edit_state.Words(place.source).none}.")
    return edit.Editing(place.source, place.rebase.with_name("resolutions"))


def _run_edit(options: argparse.Namespace) -> None:
    loaded = arguments.chosen(options)
    place = places.of(loaded)
    if options.patch and options.abort:
        raise UsageError("say one of: PATCH, --abort.")
    if options.abort:
        with files.alone(layout.BUILD):
            _tell(options, "aborted", _editing(place).abort())
        return
    if not options.patch:
        _tell_standing(options, place)
        return
    if rebase_state.under_way(place.rebase):
        raise UsageError("a rebase is under way; finish it (nox -s rebase), or drop it (--abort), first.")
    try:
        if not edit_state.under_way(place.source) and not edit.usable(place.source, place.patches):
            clone.apply(loaded, options.source)
        with files.alone(layout.BUILD):
            begun = _editing(place).begin(options.patch)
    except KeyboardInterrupt:
        if not edit_state.under_way(place.source):
            options.interrupted = "interrupted; nothing was changed, and no patch is being edited."
        raise
    where = f"patch {begun.place + 1} of {len(begun.patches)}"
    console.note("git add new files; git commit --amend there changes its message")
    words = edit_state.Words(place.source)
    console.note(f"{words.refresh} takes the changes into it; {words.abort} goes back")
    _tell(options, "editing", f"{place.source} is at {where}, {begun.name}: change its files there.")


def _tell_standing(options: argparse.Namespace, place: Places) -> None:
    """Where an edit stands, or how to begin one."""
    editing = edit_state.under_way(place.source)
    lines = _editing(place).standing() if editing else [edit_state.Words(place.source).none]
    for line in lines:
        console.note(line)
    if options.json:
        console.result({"editing": editing, "lines": lines})


def _run_refresh(options: argparse.Namespace) -> None:
    place = places.of(arguments.chosen(options))
    if options.skip and options.use_remembered:
        raise UsageError("say one of: --skip, --use-remembered.")
    with files.alone(layout.BUILD):
        editing = _editing(place)
        if options.skip:
            done = editing.skip()
        else:
            done = editing.use_remembered() if options.use_remembered else editing.refresh()
    _tell(options, "refreshed", done)


def _tell(options: argparse.Namespace, what: str, text: str) -> None:
    console.done(text)
    if options.json:
        console.result({what: True, "said": text})
