"""Whatever a user names as a file to write or to read: only a regular one, or a name that is free, is touched.

No test names a device of the machine: a file whose status says so stands for it.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.runtime.cli import conform
from forebay.runtime.cli.app import main
from forebay.specs.errors import InvalidInput
from forebay.specs.faults import matrix, runner
from forebay.specs.files import output_at, read_regular, write_text
from forebay.specs.suite import verifier, waivers
from tests.suite.small import Small

OLD = "what was there\n"


def a_folder(path: Path) -> None:
    path.mkdir()
    (path / "kept").write_text(OLD, encoding="utf-8")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)  # a whole path may be too long for an address; tests run in the folder


def linked(make: Callable[[Path], None]) -> Callable[[Path], None]:
    """A symlink to what ``make`` makes."""

    def made(path: Path) -> None:
        target = path.with_name("behind")
        make(target)
        path.symlink_to(target.name)

    return made


def a_loop(path: Path) -> None:
    path.symlink_to(path.name)


ODD = [
    pytest.param(a_folder, "is a folder", id="folder"),
    pytest.param(a_pipe, "is a pipe", id="pipe"),
    pytest.param(a_socket, "is a socket", id="socket"),
    pytest.param(linked(a_folder), "is a folder", id="link to a folder"),
    pytest.param(linked(a_pipe), "is a pipe", id="link to a pipe"),
    pytest.param(a_loop, "ymbolic link", id="loop"),
]
odd = pytest.mark.parametrize(("make", "says"), ODD)
devices = pytest.mark.parametrize(
    ("kind", "says"), [(stat.S_IFCHR, "character device"), (stat.S_IFBLK, "block device")]
)


def state(folder: Path) -> dict[str, tuple[int, int, str]]:
    """By name what is in a folder: its own kind, number and, of a link, target."""
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {
        str(path): (status.st_mode, status.st_ino, str(path.readlink()) if path.is_symlink() else "")
        for path, status in found.items()
    }


@pytest.fixture
def asked(plain_surroundings: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets a word where something was judged; nothing is."""
    told: list[str] = []

    def judged(*_: object, **__: object) -> None:
        told.append("judged")
        raise InvalidInput("it was judged")

    monkeypatch.setattr(conform, "run_pytest", judged)
    monkeypatch.setattr(runner, "run", judged)
    return told


@pytest.fixture
def as_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Makes a plain file whose status says that it is a device."""

    def make(path: Path, kind: int) -> None:
        path.write_text(OLD, encoding="utf-8")
        plain = Path.stat

        def status(given: Path, **options: bool) -> os.stat_result:
            found = plain(given, **options)
            return os.stat_result((kind | 0o666, *found[1:10])) if given.name == path.name else found

        monkeypatch.setattr(Path, "stat", status)

    return make


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command that ends with 2."""
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n"), err.startswith("error: ")) == (2, "", 1, True), err
    return err


# -- what is written -------------------------------------------------------------------------------------------------------


@odd
@pytest.mark.parametrize("option", ["--record", "--html", "--junit", "--statement"])
def test_nothing_but_a_regular_file_is_written_to(
    option: str, make: Callable[[Path], None], says: str, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told before anything is judged, and stays what it is."""
    make(Path("given"))
    before = state(Path())
    said = refused(capsys, "conform", "sim", option, "given")
    assert f"conform {option} given: " in said
    assert says in said
    assert "name another" in said
    assert (state(Path()), asked) == (before, [])


@devices
@pytest.mark.parametrize("option", ["--record", "--html", "--junit", "--statement"])
def test_no_device_is_written_to(
    option: str,
    kind: int,
    says: str,
    asked: list[str],
    as_device: Callable[[Path, int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    as_device(Path("given"), kind)
    before = state(Path())
    assert f"conform {option} given: is a {says}, expected a regular file" in refused(
        capsys, "conform", "sim", option, "given"
    )
    assert (state(Path()), Path("given").read_text(encoding="utf-8"), asked) == (before, OLD, [])


@odd
def test_the_journal_of_a_record_is_a_regular_file_too(
    make: Callable[[Path], None], says: str, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    make(Path("record.json.journal"))
    before = state(Path())
    said = refused(capsys, "conform", "sim", "--record", "record.json")
    assert "its journal" in said
    assert says in said
    assert (state(Path()), asked) == (before, [])


@odd
@pytest.mark.parametrize("name", [matrix.MATRIX_JSON, matrix.MATRIX_PAGE, matrix.PARTIAL, f"{matrix.PARTIAL}.lock"])
def test_the_matrix_of_faults_is_of_regular_files(
    name: str, make: Callable[[Path], None], says: str, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    make(Path(name))
    before = state(Path())
    said = refused(capsys, "faults", "--full", "--matrix", ".")
    assert name in said
    assert says in said
    assert (state(Path()), asked) == (before, [])


@pytest.mark.parametrize("name", ["given", "given.journal"])
@pytest.mark.parametrize("make", [a_pipe, a_folder])
def test_plain_pytest_writes_to_regular_files_alone(make: Callable[[Path], None], name: str, small: Small) -> None:
    make(small.work / name)
    before = state(small.work)
    said = small.pytest("--pyargs", "forebay.specs.suite", "--backend", "sim", "--suite-record", "given")
    assert (said.code, len(said.err.strip().splitlines())) == (4, 1), said
    assert f"{name}: is a {make.__name__[2:]}, expected a regular file" in said.err
    assert state(small.work) == before


def test_a_link_is_followed_and_its_target_written(small: Small) -> None:
    """Its target may be there or not; nothing else is left in either folder."""
    kept = small.work / "kept"
    kept.mkdir()
    given = {"--record": "record.json", "--html": "page.html", "--junit": "junit.xml", "--statement": "statement.md"}
    for number, name in enumerate(given.values()):
        if number % 2:
            (kept / name).write_text(OLD, encoding="utf-8")
        (small.work / name).symlink_to(Path("kept", name))
    said = small.forebay("conform", "sim", "-k", "stage", *(part for pair in given.items() for part in pair))
    assert (said.code, said.err) == (0, "")
    for name in given.values():
        assert (small.work / name).readlink() == Path("kept", name)
        assert (kept / name).read_text(encoding="utf-8") not in ("", OLD)
    assert json.loads((kept / "record.json").read_text(encoding="utf-8"))["verdict"] == "passed"
    assert {path.name for path in kept.iterdir()} == set(given.values())
    assert {path.name for path in small.work.iterdir()} == {*given.values(), "kept"}


def test_a_link_where_the_journal_comes_is_not_followed(small: Small) -> None:
    (small.work / "theirs").write_text(OLD, encoding="utf-8")
    (small.work / "record.json.journal").symlink_to("theirs")
    arguments = ("--pyargs", "forebay.specs.suite", "--backend", "sim", "-k", "stage", "--suite-record", "record.json")
    assert small.pytest(*arguments).code == 0
    assert {path.name for path in small.work.iterdir()} == {"record.json", "theirs"}
    assert (small.work / "theirs").read_text(encoding="utf-8") == OLD


def test_two_links_to_one_file_are_one_file(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("a").symlink_to("target")
    Path("b").symlink_to("target")
    assert "conform --html b: is the file of --record too" in refused(
        capsys, "conform", "sim", "--record", "a", "--html", "b"
    )
    assert asked == []


def test_a_text_is_written_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = output_at(tmp_path / "text", "it")
    write_text(path, "a \ud800\n")
    assert path.read_bytes() == b"a \\ud800\n"
    path.chmod(0o640)
    write_text(path, "b\n")
    assert (path.read_text(encoding="utf-8"), stat.S_IMODE(path.stat().st_mode)) == ("b\n", 0o640)

    def fail(*_: object) -> None:
        assert path.read_text(encoding="utf-8") == "b\n"
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        write_text(path, "c\n")
    assert [(each.name, each.read_text(encoding="utf-8")) for each in tmp_path.iterdir()] == [("text", "b\n")]


def test_a_name_that_no_system_takes_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="it: File name too long; name another file"):
        output_at(tmp_path / ("n" * 300), "it")


# -- what is read ----------------------------------------------------------------------------------------------------------

READ = [
    pytest.param(("conform", "--verify", "given"), "record given", verifier.LARGEST, id="verify"),
    pytest.param(("conform", "sim", "--waivers", "given"), "waivers given", waivers.LARGEST, id="waivers"),
]
read = pytest.mark.parametrize(("arguments", "named", "largest"), READ)


@read
@odd
def test_nothing_but_a_regular_file_is_read(
    arguments: tuple[str, ...],
    named: str,
    largest: int,
    make: Callable[[Path], None],
    says: str,
    asked: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A pipe that nobody writes to would never end."""
    make(Path("given"))
    before = state(Path())
    said = refused(capsys, *arguments)
    assert f"{named}: " in said
    assert says in said
    assert (state(Path()), asked) == (before, [])


@read
@devices
def test_no_device_is_read(
    arguments: tuple[str, ...],
    named: str,
    largest: int,
    kind: int,
    says: str,
    asked: list[str],
    as_device: Callable[[Path, int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    as_device(Path("given"), kind)
    assert f"{named}: is a {says}, expected a regular file" in refused(capsys, *arguments)
    assert asked == []


@read
def test_a_file_that_is_too_large_is_not_read(
    arguments: tuple[str, ...],
    named: str,
    largest: int,
    asked: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Path("given").open("wb") as file:
        file.truncate(largest + 1)  # a hole: no byte of it is on the disk
    monkeypatch.delattr(Path, "open")
    said = refused(capsys, *arguments)
    assert f"{named}: has {largest + 1} bytes or more, expected {largest} at most" in said
    assert asked == []


def test_a_file_that_grows_past_the_limit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is bounded, whatever its status said."""
    path = tmp_path / "given"
    path.write_bytes(b"12345")
    plain = Path.stat

    def small(given: Path, **options: bool) -> os.stat_result:
        found = plain(given, **options)
        return os.stat_result((*found[:6], 0, *found[7:10]))

    monkeypatch.setattr(Path, "stat", small)
    assert read_regular(path, 5, "it") == b"12345"
    with pytest.raises(InvalidInput, match=r"^it: has 5 bytes or more, expected 4 at most; is it the right file\?"):
        read_regular(path, 4, "it")


@read
def test_a_link_to_a_regular_file_is_read(
    arguments: tuple[str, ...], named: str, largest: int, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What is said is of its content."""
    Path("behind").write_text("nothing of the kind\n", encoding="utf-8")
    Path("given").symlink_to("behind")
    code = main(arguments)
    out, err = capsys.readouterr()
    if "--verify" in arguments:
        assert (code, err) == (1, "")
        assert out.startswith("given: not JSON: ")
    else:
        assert (code, out) == (2, "")
        assert err.startswith("error: waivers given: Expected '='")
    assert asked == []
