"""Choosing and opening a backend (clauses B2, B3, B5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.runtime.selection import Requirements, open_backend, parse_choice, select
from forebay.runtime.settings import Settings
from forebay.specs.descriptor import Availability, Candidate
from forebay.specs.driver import Driver
from forebay.specs.errors import BackendUnavailable, InvalidSetting, UnknownBackend, Unsupported
from tests.selection.fakes import ABSENT, Forbidden, Loader, cpu, descriptor, manager_of, mode


def considered(selection: Any) -> dict[str, str]:
    return {candidate.name: candidate.passed_over for candidate in selection.considered}


# -- explicit choices --------------------------------------------------------------------------------------------------


def test_name_and_mode_are_parted() -> None:
    assert parse_choice("cpu", "call") == ("cpu", None)
    assert parse_choice("cuda:interpret", "call") == ("cuda", "interpret")


@pytest.mark.parametrize("requested", ["", ":", "cuda:", ":interpret", "a:b:c"])
def test_another_form_is_refused_with_its_source(requested: str) -> None:
    with pytest.raises(
        InvalidSetting, match=rf"backend = '{requested}' \(environment X\); expected NAME, NAME:MODE or auto"
    ):
        select(requested, "environment", "X", manager_of(cpu()))


def test_auto_takes_no_mode() -> None:
    with pytest.raises(InvalidSetting, match="auto takes no mode"):
        select("auto:interpret", "call", "", manager_of(cpu()))


def test_the_first_mode_is_the_default_and_others_are_asked_for() -> None:
    manager = manager_of(descriptor("cuda", mode(), mode("interpret", kind="interpreted")))
    assert select("cuda", "call", "", manager)[0].mode == ""
    selection, chosen = select("cuda:interpret", "call", "", manager)
    assert (selection.name, selection.mode, chosen.kind) == ("cuda", "interpret", "interpreted")
    assert selection.considered == (Candidate("cuda:interpret", ""),)


def test_an_unknown_mode_lists_the_modes() -> None:
    manager = manager_of(descriptor("cuda", mode(), mode("interpret", kind="interpreted")))
    with pytest.raises(UnknownBackend) as caught:
        select("cuda:interpet", "call", "", manager)
    assert str(caught.value) == (
        "backend 'cuda' has no mode 'interpet'; its modes: cuda, cuda:interpret; did you mean 'cuda:interpret'?"
    )


@pytest.mark.clause("B3")
@pytest.mark.case("F03")
def test_an_explicit_choice_is_never_replaced() -> None:
    cause = OSError("driver too old")
    unusable = Availability(usable=False, reason="the driver is too old", hint="update it", cause=cause)
    manager = manager_of(cpu(), descriptor("good"), descriptor("sage", mode(probe=unusable)))
    with pytest.raises(BackendUnavailable) as caught:
        select("sage", "file", "forebay.toml:1", manager)
    assert caught.value.__cause__ is cause
    for part in (
        "'sage'",
        "file forebay.toml:1",
        "the driver is too old",
        "known backends: cpu, good, sage",
        "update it",
    ):
        assert part in str(caught.value)


@pytest.mark.clause("B3")
def test_an_explicit_choice_without_a_hint_of_its_own_gets_the_backend_s() -> None:
    absent = Availability(usable=False, reason="no device found")
    with pytest.raises(BackendUnavailable, match=r"to make it usable: pip install it$"):
        select("cuda", "call", "", manager_of(descriptor("cuda", mode(probe=absent))))


# -- requirements ------------------------------------------------------------------------------------------------------

LIMITED: dict[str, tuple[Any, ...]] = {"kv_dtype": ("float32",), "head_dim": (64, 128), "features": ("lse",)}
NEEDS = [
    (Requirements.of(kv_dtype="bfloat16"), "kv_dtype: needs 'bfloat16' (call), found 'float32'"),
    (Requirements.of(head_dim=96), "head_dim: needs 96 (call), found 64, 128"),
    (Requirements.of(features=("lse", "unified")), "features: needs 'unified' (call), found 'lse'"),
]


@pytest.mark.clause("B3")
@pytest.mark.case("F04")
@pytest.mark.parametrize(("needs", "text"), NEEDS)
def test_auto_passes_over_what_lacks_something_with_the_reason(needs: Requirements, text: str) -> None:
    load, loader = Forbidden(), Loader()
    manager = manager_of(
        cpu(), descriptor("fast", mode(load=load, supports=LIMITED)), descriptor("slow", mode(load=loader))
    )
    with open_backend(require=needs, manager=manager) as backend:
        assert (backend.name, backend.selection.source) == ("slow", "default")
        assert considered(backend.selection) == {"fast": text, "slow": ""}
    assert load.calls == 0


@pytest.mark.case("F04")
@pytest.mark.parametrize("source", ["call", "environment", "file"])
def test_a_preference_gives_way_and_a_choice_does_not(tmp_path: Path, source: str) -> None:
    manager = manager_of(cpu(), descriptor("x", mode(supports={"head_dim": (64,)})), descriptor("y"))
    needs = Requirements.of(head_dim=96)
    (tmp_path / "forebay.toml").write_text('backend = "x"\n' if source == "file" else "")
    environ = {"FOREBAY_BACKEND": "x"} if source == "environment" else {}
    chosen = Settings.resolve(start_dir=tmp_path, environ=environ, **({"backend": "x"} if source == "call" else {}))
    with pytest.raises(Unsupported, match=rf"backend 'x' \({source}"):
        open_backend(settings=chosen, require=needs, manager=manager)
    unset = Settings.resolve(start_dir=tmp_path / "..", environ={})
    with open_backend(settings=unset, require=needs, manager=manager) as backend:
        assert backend.name == "y"
        assert (backend.selection.requested, backend.selection.source) == ("auto", "default")


@pytest.mark.case("F04")
def test_a_setting_somebody_made_is_a_requirement_and_a_default_is_not(tmp_path: Path) -> None:
    manager = manager_of(cpu(supports={"attention": ("gather",), "kv_dtype": ("float32",)}))
    plain = Settings.resolve(start_dir=tmp_path, environ={})
    open_backend("cpu", settings=plain, manager=manager).close()
    asked = Settings.resolve(start_dir=tmp_path, environ={"FOREBAY_ATTENTION": "direct"})
    with pytest.raises(
        Unsupported, match=r"attention: needs 'direct' \(environment FOREBAY_ATTENTION\), found 'gather'"
    ):
        open_backend("cpu", settings=asked, manager=manager)
    with pytest.raises(
        Unsupported, match=r"found no backend that supports .* cpu: kv_dtype: needs 'bfloat16' \(call\)"
    ):
        open_backend(settings=plain.override(kv_dtype="bfloat16"), manager=manager)


def test_requirements_are_joined_and_the_later_value_counts() -> None:
    both = Requirements({"a": 1, "b": 2}, {"a": "file x"}) | Requirements.of(a=3)
    assert (both.needs, both.origins["a"]) == ({"a": 3, "b": 2}, "call")


# -- auto --------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("B3")
def test_auto_takes_the_first_usable_accelerator_in_name_order() -> None:
    late, early, absent = descriptor("zeta"), descriptor("beta"), descriptor("alpha", mode(probe=ABSENT))
    for order in ((cpu(), late, early, absent), (absent, early, late, cpu())):
        selection, _ = select("auto", "default", "", manager_of(*order))
        assert selection.name == "beta"
        assert considered(selection) == {"alpha": "no device found (plug one in)", "beta": ""}


@pytest.mark.clause("B3")
@pytest.mark.parametrize("kind", ["reference", "interpreted", "simulated", "host"])
def test_auto_never_takes_another_kind_however_usable(kind: Any) -> None:
    manager = manager_of(
        descriptor("a-stand-in", mode(kind=kind)),
        cpu(),
        descriptor("cuda", mode(probe=ABSENT), mode("second", kind=kind)),
    )
    selection, chosen = select("auto", "default", "", manager)
    assert (selection.name, chosen.kind) == ("cpu", "host")
    reason = f"its kind is {kind}: auto takes an accelerator, else cpu"
    assert considered(selection) == {
        "a-stand-in": reason,
        "cuda": "no device found (plug one in)",
        "cuda:second": reason,
        "cpu": "",
    }
    assert select("a-stand-in", "call", "", manager)[0].name == "a-stand-in", "asked for by name, it runs"


@pytest.mark.clause("B3")
def test_auto_never_takes_a_simulated_cpu() -> None:
    with pytest.raises(BackendUnavailable, match="cpu: its kind is simulated"):
        select("auto", "default", "", manager_of(descriptor("cpu", mode(kind="simulated"))))


@pytest.mark.clause("B3")
def test_auto_takes_a_later_accelerator_mode_of_a_backend() -> None:
    manager = manager_of(cpu(), descriptor("tpu", mode(probe=ABSENT), mode("xla")))
    selection, _ = select("auto", "default", "", manager)
    assert (selection.name, selection.mode) == ("tpu", "xla")


@pytest.mark.clause("B3")
def test_auto_without_anything_usable_lists_every_reason() -> None:
    manager = manager_of(cpu(probe=ABSENT), descriptor("cuda", mode(probe=ABSENT)))
    with pytest.raises(BackendUnavailable) as caught:
        select("auto", "default", "", manager)
    for part in ("cpu: no device found", "cuda: no device found", "pip install 'forebay[cpu]'"):
        assert part in str(caught.value)
    with pytest.raises(BackendUnavailable, match="none is installed"):
        select("auto", "default", "", manager_of())


@pytest.mark.clause("B3")
@pytest.mark.case("F01")
@pytest.mark.parametrize("error", [ModuleNotFoundError("stale_dep"), OSError("libchip.so.1: cannot open")])
def test_a_driver_that_fails_to_load(error: Exception) -> None:
    def fails() -> Driver:
        raise error

    manager = manager_of(cpu(), descriptor("myplug", mode(load=fails)))
    with pytest.raises(BackendUnavailable) as caught:
        open_backend("myplug", manager=manager)
    assert caught.value.__cause__ is error
    for part in ("'myplug'", type(error).__name__, str(error), "known backends: cpu, myplug", "pip install it"):
        assert part in str(caught.value)
    with open_backend(manager=manager) as backend:
        assert backend.name == "cpu"
        assert considered(backend.selection) == {
            "myplug": f"its driver failed to load: {type(error).__name__}: {error}",
            "cpu": "",
        }


@pytest.mark.clause("B3")
def test_auto_does_not_go_on_after_cpu() -> None:
    def fails() -> Driver:
        raise OSError("no memory")

    with pytest.raises(BackendUnavailable, match="OSError: no memory"):
        open_backend(manager=manager_of(cpu(load=fails)))
