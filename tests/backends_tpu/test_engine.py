"""The engine over JAX: golden tokens in three arms, kernels of our own and nobody else's attention, staging and offload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest

from forebay.runtime import Engine, Model, SamplingParams, load_model, open_backend
from forebay.runtime.models import fetch
from forebay.runtime.settings import user_cache_dir
from forebay.specs import Backend
from tests.runtime.harness import ARMS, make_engine, prompt, tokens_of, write_tiny_folder

ALL = SamplingParams(max_tokens=64, ignore_eos=True)
LAYERS = 30
LIBRARY = ("dot_product_attention", "softmax", "log_softmax")
"""What attention would be made of, if it were not a kernel of ours."""


@pytest.fixture(autouse=True)
def no_library_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a library computed attention")

    for name in LIBRARY:
        monkeypatch.setattr(jax.nn, name, refuse)


@pytest.fixture(scope="module")
def smollm2() -> Model:
    return load_model(fetch("smollm2-135m", cache_dir=user_cache_dir()), dtype="float32")


@pytest.fixture(scope="module", params=ARMS)
def engine(request: pytest.FixtureRequest, smollm2: Model) -> Iterator[Engine]:
    capture = "required" if request.param == "captured" else "auto"
    with (
        open_backend("tpu:xla") as backend,
        make_engine(smollm2, backend, arm=request.param, capture=capture, slots=8, max_len=128) as made,
    ):
        yield made


@pytest.mark.model
@pytest.mark.clause("C3", "C11")
def test_golden_tokens_one_prompt_at_a_time(engine: Engine, golden: list[dict[str, Any]]) -> None:
    results = [engine.generate([item["prompt"]], ALL)[0] for item in golden]
    assert tokens_of(results) == [tuple(item["output_ids"]) for item in golden]


@pytest.mark.model
@pytest.mark.clause("C3", "C11", "C9")
def test_golden_tokens_of_all_prompts_at_once(engine: Engine, golden: list[dict[str, Any]]) -> None:
    backend = engine.backend
    before = backend.counters.replay
    assert tokens_of(engine.generate([item["prompt"] for item in golden], ALL)) == [
        tuple(item["output_ids"]) for item in golden
    ]
    assert (backend.counters.replay > before) == (engine.arm == "captured")
    assert backend.counters.delegated.total() == 0
    ran = backend.info["launches" if engine.arm == "eager" else "replayed"]
    assert ran.keys() >= {"paged_decode", "write_rows"}


@pytest.mark.model
@pytest.mark.clause("C3", "C11")
def test_golden_tokens_by_the_interpreted_kernel(smollm2: Model, golden: list[dict[str, Any]]) -> None:
    item = min(golden, key=lambda item: len(item["prompt_ids"]))
    eight = SamplingParams(max_tokens=8, ignore_eos=True)
    with (
        open_backend("tpu:interpret") as backend,
        make_engine(smollm2, backend, capture="required", slots=1, max_len=64) as engine,
    ):
        (result,) = engine.generate([item["prompt"]], eight)
        assert backend.info["replayed"]["paged_decode"] == LAYERS * (backend.counters.replay + backend.counters.run)
    assert list(result.token_ids) == item["output_ids"][:8]


# -- a tiny model ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_tiny_folder(tmp_path_factory.mktemp("tiny") / "model"), dtype="float32")


@pytest.fixture(params=["tpu:xla", "tpu:interpret"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with open_backend(request.param) as opened:
        yield opened


@pytest.mark.clause("S1", "S3", "C11")
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_what_was_offloaded_comes_back(backend: Backend, tiny: Model, kv_dtype: str) -> None:
    """Two requests in room for one and a half: one is preempted, kept by the host and staged back; its tokens stay."""
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    prompts = [prompt(5, seed=1), prompt(6, seed=2)]
    options: dict[str, Any] = {"slots": 2, "block_size": 2, "max_len": 22, "kv_dtype": kv_dtype}
    with open_backend("cpu", threads=1) as cpu, make_engine(tiny, cpu, arm="eager", **options) as engine:
        want = tokens_of(engine.generate(prompts, params))
    with make_engine(tiny, backend, num_blocks=14, preempt="offload", **options) as engine:
        assert tokens_of(engine.generate(prompts, params)) == want
        assert engine.report()["engine"]["restored"] > 0
    assert backend.info["launches"]["stage_pages"] > 0
    assert backend.info["launches"]["read_rows"] > 0


@pytest.mark.clause("C11", "D4", "D12")
@pytest.mark.parametrize("path", ["direct", "gather"])
@pytest.mark.parametrize("arm", ARMS)
def test_an_engine_decodes_by_kernels_alone(backend: Backend, tiny: Model, arm: str, path: str) -> None:
    four = SamplingParams(max_tokens=4, ignore_eos=True)
    prompts = [prompt(3), prompt(7)]
    options: dict[str, Any] = {"slots": 2, "max_len": 32, "block_size": 4}
    with open_backend("cpu", threads=1) as cpu, make_engine(tiny, cpu, arm="eager", **options) as engine:
        want = tokens_of(engine.generate(prompts, four))
    capture = "required" if arm == "captured" else "auto"
    with make_engine(tiny, backend, arm=arm, capture=capture, attention=path, **options) as engine:
        assert tokens_of(engine.generate(prompts, four)) == want
    done = backend.info["launches" if arm == "eager" else "replayed"]
    assert done.keys() >= {"paged_decode", "write_rows"}
    assert ("gather_pages" in done) == (path == "gather")
    assert backend.counters.delegated.total() == 0
    assert (backend.counters.replay > 0) == (arm == "captured")
