"""Settings: precedence, sources, files, and everything that is refused (clause B2)."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.runtime.settings import SETTINGS, Settings, traceback_wanted, user_cache_dir
from forebay.specs.errors import InvalidSetting

# key, then a value of its own for each source: the text of a variable, a TOML literal, an argument; default last
MATRIX: list[tuple[str, tuple[str, Any], tuple[str, Any], Any, Any]] = [
    ("backend", ("one", "one"), ('"two"', "two"), "three", "auto"),
    ("slots", ("2", 2), ("3", 3), 4, 8),
    ("num_blocks", ("20", 20), ("30", 30), None, None),
    ("attention", ("gather", "gather"), ('"direct"', "direct"), "gather", "direct"),
    ("traceback", ("yes", True), ("false", False), True, False),
]


@pytest.mark.clause("B2")
@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize(("key", "variable", "line", "argument", "default"), MATRIX)
def test_call_beats_environment_beats_file_beats_default(
    tmp_path: Path,
    given: tuple[bool, bool, bool],
    key: str,
    variable: tuple[str, Any],
    line: tuple[str, Any],
    argument: Any,
    default: Any,
) -> None:
    by_call, by_environment, by_file = given
    file = tmp_path / "forebay.toml"
    file.write_text(f"# a comment\n{key} = {line[0]}\n" if by_file else "")
    environ = {f"FOREBAY_{key.upper()}": variable[0]} if by_environment else {}
    settings = Settings.resolve(start_dir=tmp_path, environ=environ, **({key: argument} if by_call else {}))
    expected = (
        (argument, "call", "")
        if by_call
        else (variable[1], "environment", f"FOREBAY_{key.upper()}")
        if by_environment
        else (line[1], "file", f"{file}:2")
        if by_file
        else (default, "default", "")
    )
    assert (getattr(settings, key), settings.source(key), settings.origin(key)) == expected
    entry = settings.as_report()[key]
    assert (entry["value"], entry["source"], entry["origin"]) == expected


@pytest.mark.clause("B2")
def test_report_holds_every_setting_as_plain_data(tmp_path: Path) -> None:
    report = Settings.resolve(start_dir=tmp_path, environ={"FOREBAY_CACHE_DIR": "/cache"}, slots=2).as_report()
    assert list(report) == list(SETTINGS)
    assert json.loads(json.dumps(report)) == report
    assert report["cache_dir"] == {"value": "/cache", "source": "environment", "origin": "FOREBAY_CACHE_DIR"}


@pytest.mark.case("F03")
def test_a_later_value_replaces_an_earlier_one(tmp_path: Path) -> None:
    settings = Settings.resolve(start_dir=tmp_path, environ={"FOREBAY_BACKEND": "zero"}, backend="one")
    later = settings.override(backend="two").override(backend="three", slots=2)
    assert (later.backend, later.source("backend"), later.slots) == ("three", "call", 2)
    assert settings.backend == "one", "settings are frozen: an override makes new ones"


def test_the_nearest_folder_with_settings_is_read_alone(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "forebay.toml").write_text('backend = "far"\nslots = 3\n')
    assert Settings.resolve(start_dir=inner, environ={}).backend == "far"
    (tmp_path / "a" / "pyproject.toml").write_text('[project]\nname = "x"\n')
    assert Settings.resolve(start_dir=inner, environ={}).backend == "far", (
        "a pyproject without the table is no settings file"
    )
    (tmp_path / "a" / "pyproject.toml").write_text('[project]\nname = "x"\n\n[tool.forebay]\nbackend = "near"\n')
    near = Settings.resolve(start_dir=inner, environ={})
    assert (near.backend, near.slots) == ("near", 8)
    assert near.origin("backend") == f"{tmp_path / 'a' / 'pyproject.toml'}:5"


def test_forebay_toml_wins_over_pyproject_in_one_folder_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "forebay.toml").write_text('backend = "from-forebay"\n')
    (tmp_path / "pyproject.toml").write_text('[tool.forebay]\nbackend = "from-pyproject"\nslots = 5\n')
    settings = Settings.resolve(start_dir=tmp_path, environ={})
    assert (settings.backend, settings.slots) == ("from-forebay", 5)
    assert settings.origin("backend") == f"{tmp_path / 'forebay.toml'}:1"
    assert settings.origin("slots") == f"{tmp_path / 'pyproject.toml'}:3"


@pytest.mark.parametrize("text", ["tool.forebay.slots = 5\n", "[tool]\nforebay = { slots = 5 }\n"])
def test_a_table_written_another_way_is_named_without_a_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    settings = Settings.resolve(start_dir=tmp_path, environ={})
    assert (settings.slots, settings.origin("slots")) == (5, f"{tmp_path / 'pyproject.toml'} [tool.forebay]")


def test_a_named_file_replaces_the_search(tmp_path: Path) -> None:
    (tmp_path / "forebay.toml").write_text('backend = "found"\nslots = 3\n')
    (tmp_path / "other.toml").write_text('backend = "named"\n')
    (tmp_path / "third.toml").write_text('backend = "called"\n')
    environ = {"FOREBAY_CONFIG": str(tmp_path / "other.toml")}
    named = Settings.resolve(start_dir=tmp_path, environ=environ)
    assert (named.backend, named.slots) == ("named", 8)
    assert Settings.resolve(start_dir=tmp_path, environ=environ, config=tmp_path / "third.toml").backend == "called"


def test_relative_paths_of_a_file_are_relative_to_it(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "forebay.toml").write_text('model = "./models/a"\ncache_dir = "cache"\n')
    settings = Settings.resolve(start_dir=inner, environ={})
    assert (settings.model, settings.cache_dir) == (str(tmp_path / "models" / "a"), tmp_path / "cache")
    (tmp_path / "forebay.toml").write_text('model = "smollm2-135m"\ncache_dir = "/abs"\n')
    settings = Settings.resolve(start_dir=inner, environ={})
    assert (settings.model, settings.cache_dir) == ("smollm2-135m", Path("/abs"))


@pytest.mark.parametrize("name", ["smollm2-135m", "org/name", "org/name@v1", "file.gguf"])
def test_a_model_of_a_file_is_a_path_only_where_something_lies_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "forebay.toml").write_text(f'model = "{name}"\n')
    assert Settings.resolve(start_dir=tmp_path, environ={}).model == name
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    assert Settings.resolve(start_dir=tmp_path, environ={}).model == str(tmp_path / name)


def test_cache_dir_follows_the_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert user_cache_dir(environ) == tmp_path / "forebay"
    assert Settings.resolve(start_dir=tmp_path, environ=environ).cache_dir == tmp_path / "forebay"
    assert user_cache_dir({}) == Path.home() / ".cache" / "forebay"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert user_cache_dir({}) == Path.home() / "Library" / "Caches" / "forebay"
    monkeypatch.setattr(sys, "platform", "win32")
    assert user_cache_dir({"LOCALAPPDATA": str(tmp_path)}) == tmp_path / "forebay"


@pytest.mark.parametrize("key", ["kv_dtype", "arm", "num_blocks", "max_len", "threads", "model"])
def test_none_in_a_variable_takes_a_value_back(tmp_path: Path, key: str) -> None:
    settings = Settings.resolve(start_dir=tmp_path, environ={f"FOREBAY_{key.upper()}": "none"})
    assert (getattr(settings, key), settings.source(key)) == (None, "environment")


def test_an_empty_variable_counts_as_not_set(tmp_path: Path) -> None:
    assert Settings.resolve(start_dir=tmp_path, environ={"FOREBAY_SLOTS": ""}).source("slots") == "default"


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.clause("B2")
@pytest.mark.parametrize(
    ("source", "named", "nearest"),
    [
        ("call", "bakend", "'backend'"),
        ("environment", "FOREBAY_BAKEND", "'FOREBAY_BACKEND'"),
        ("file", "bakend", "'backend'"),
        ("pyproject", "bakend", "'backend'"),
    ],
)
def test_an_unknown_key_is_refused_with_its_source_and_the_nearest(
    tmp_path: Path, source: str, named: str, nearest: str
) -> None:
    if source == "file":
        (tmp_path / "forebay.toml").write_text('bakend = "cpu"\n')
    if source == "pyproject":
        (tmp_path / "pyproject.toml").write_text('[tool.forebay]\nbakend = "cpu"\n')
    environ = {"FOREBAY_BAKEND": "cpu"} if source == "environment" else {}
    overrides = {"bakend": "cpu"} if source == "call" else {}
    with pytest.raises(InvalidSetting) as caught:
        Settings.resolve(start_dir=tmp_path, environ=environ, **overrides)
    where = {"file": f"file {tmp_path}/forebay.toml:1", "pyproject": f"file {tmp_path}/pyproject.toml:2"}
    where |= {"call": "call", "environment": "environment FOREBAY_BAKEND"}
    assert str(caught.value) == f"unknown setting '{named}' ({where[source]}); did you mean {nearest}?"


def test_an_unknown_key_unlike_any_other_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"unknown setting 'zzzz' \(call\); known: backend, model, dtype"):
        Settings.resolve(start_dir=tmp_path, environ={}, zzzz=1)
    with pytest.raises(InvalidSetting, match="unknown setting 'provenance'"):
        Settings.resolve(start_dir=tmp_path, environ={}, provenance={})
    with pytest.raises(InvalidSetting, match="did you mean 'slots'"):
        Settings().source("slot")


WRONG: list[tuple[str, Any, str, str, str]] = [
    # key, argument, text of the variable, TOML literal, what is allowed
    ("slots", "8", "eight", '"8"', "expected an integer of at least 1"),
    ("slots", True, "true", "true", "expected an integer of at least 1"),
    ("slots", 0, "0", "0", "expected an integer of at least 1"),
    ("slots", 1.5, "1.5", "1.5", "expected an integer of at least 1"),
    ("num_blocks", 1, "1", "1", "expected an integer of at least 2 or none"),
    ("read_behind", -1, "-1", "-1", "expected an integer of at least 0"),
    ("attention", "both", "both", '"both"', "expected 'direct' or 'gather'"),
    ("attention", 1, "1", "1", "expected 'direct' or 'gather'"),
    ("kv_dtype", "int4", "int4", '"int4"', "expected 'float32' or 'bfloat16' or none"),
    ("arm", "capture", "capture", "[]", "expected 'eager' or 'hostfree' or 'captured' or none"),
    ("traceback", "maybe", "maybe", '"yes"', "expected true or false"),
    ("model", 3, "", "3", "expected a string that is not empty or none"),
    ("model", "", "", '""', "expected a string that is not empty or none"),
    ("backend", None, "", "{}", "expected a string that is not empty"),
    ("cache_dir", 7, "", "7", "expected a path"),
]


@pytest.mark.parametrize(("key", "argument", "text", "literal", "allowed"), WRONG)
def test_a_wrong_value_is_refused_with_key_value_source_and_what_is_allowed(
    tmp_path: Path, key: str, argument: Any, text: str, literal: str, allowed: str
) -> None:
    with pytest.raises(InvalidSetting) as caught:
        Settings.resolve(start_dir=tmp_path, environ={}, **{key: argument})
    assert str(caught.value) == f"{key} = {argument!r} (call); {allowed}"
    if text:
        with pytest.raises(InvalidSetting) as caught:
            Settings.resolve(start_dir=tmp_path, environ={f"FOREBAY_{key.upper()}": text})
        assert str(caught.value) == f"{key} = {text!r} (environment FOREBAY_{key.upper()}); {allowed}"
    file = tmp_path / "forebay.toml"
    file.write_text(f"{key} = {literal}\n")
    with pytest.raises(InvalidSetting) as caught:
        Settings.resolve(start_dir=tmp_path, environ={})
    assert f"(file {file}:1); {allowed}" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"slots = \n", "cannot be read: Invalid value"),
        (b"\xff", "cannot be read"),
        (b"slots = 1\nslots = 2\n", "Cannot overwrite"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "forebay.toml"
    file.write_bytes(content)
    with pytest.raises(InvalidSetting, match=message) as caught:
        Settings.resolve(start_dir=tmp_path, environ={})
    assert str(file) in str(caught.value)


def test_a_named_file_must_be_there_and_hold_settings(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"no settings file '.*gone.toml' \(config, call\)"):
        Settings.resolve(config=tmp_path / "gone.toml", environ={})
    with pytest.raises(InvalidSetting, match=r"no settings file .* \(environment FOREBAY_CONFIG\)"):
        Settings.resolve(start_dir=tmp_path, environ={"FOREBAY_CONFIG": str(tmp_path)})
    (tmp_path / "pyproject.toml").write_text("")
    with pytest.raises(InvalidSetting, match=r"has no table \[tool.forebay\]"):
        Settings.resolve(config=tmp_path / "pyproject.toml", environ={})
    (tmp_path / "pyproject.toml").write_text("tool.forebay = 3\n")
    with pytest.raises(InvalidSetting, match="expected a table"):
        Settings.resolve(config=tmp_path / "pyproject.toml", environ={})


def test_traceback_is_known_although_the_settings_are_at_fault(tmp_path: Path) -> None:
    bad = {"FOREBAY_SLOTZ": "1"}
    assert not traceback_wanted(environ=bad)
    assert traceback_wanted(environ={**bad, "FOREBAY_TRACEBACK": "1"})
    assert traceback_wanted(environ={"FOREBAY_TRACEBACK": "on"})


# -- without pydantic --------------------------------------------------------------------------------------------------

WITHOUT_PYDANTIC = """
import sys
sys.modules["pydantic"] = None  # what an import of a missing package finds
from forebay.runtime.selection import open_backend
from forebay.runtime.settings import Settings
from forebay.specs.errors import InvalidSetting
from tests.selection.fakes import cpu, descriptor, manager_of

manager = manager_of(cpu(), descriptor("fake"))
with open_backend("fake", manager=manager, threads=2) as backend:
    print(backend.name, backend.selection.source)
settings = Settings.resolve(slots=4)
print(settings.slots, settings.source("slots"), settings.dtype)
for name, act in (("unknown key", lambda: Settings.resolve(slotz=4)),
                  ("variable", lambda: Settings.resolve(environ={"FOREBAY_SLOTS": "4"}))):
    try:
        act()
    except InvalidSetting as error:
        print(name, "->", error)
"""


def test_explicit_arguments_work_without_pydantic(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYDANTIC],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(root)},
        check=True,
    )
    assert done.stdout.splitlines() == [
        "fake call",
        "4 call float32",
        "unknown key -> unknown setting 'slotz' (call); did you mean 'slots'?",
        (
            "variable -> slots is set by environment FOREBAY_SLOTS, and reading that needs pydantic: pip install pydantic, "
            "or remove it and pass slots as an argument"
        ),
    ]
