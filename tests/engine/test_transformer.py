"""The forward pass against transformers on tiny random models of every architecture, in float32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl2chat.engine.transformer import Transformer
from exl2chat.errors import ContextError
from exl2chat.model.arch import ARCHITECTURES
from exl2chat.ops import reference
from exl2chat.ops.packed import Norm, Weight
from tests.engine.transformers_models import TOLERANCE, VARIANTS, VOCABULARY, load, make_model, tokens


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Transformer]:
    """A model of transformers and ours over the same files."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = make_model(folder, *VARIANTS[request.param])
    return theirs, load(folder)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    """A model with a window, for tests of the cache."""
    folder = tmp_path_factory.mktemp("window")
    make_model(folder, *VARIANTS["gemma2"])
    return load(folder)


def test_every_architecture_has_a_variant() -> None:
    assert {family + "ForCausalLM" for family, _ in VARIANTS.values()} == {n for a in ARCHITECTURES for n in a.names}


def test_prefill_matches_transformers(pair: tuple[Any, Transformer]) -> None:
    theirs, model = pair
    ids = tokens(50)
    with torch.inference_mode():
        expected = theirs(ids.unsqueeze(0)).logits[0]
    logits = model.forward(ids, model.new_cache(64))
    assert logits.dtype == torch.float32
    assert expected.std() > 0.5  # logits that differ, or the tolerance means nothing
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


def test_decoding_step_by_step_matches_transformers(pair: tuple[Any, Transformer]) -> None:
    theirs, model = pair
    ids = tokens(40, seed=1)
    with torch.inference_mode():
        expected = theirs(ids.unsqueeze(0)).logits[0]
    cache = model.new_cache(64)
    steps = [model.forward(ids[:9], cache), *(model.forward(token.view(1), cache) for token in ids[9:])]
    torch.testing.assert_close(torch.cat(steps), expected, rtol=0, atol=TOLERANCE)


def test_longrope_beyond_its_original_context_matches_transformers(tmp_path: Path) -> None:
    theirs = make_model(tmp_path, *VARIANTS["phi3-longrope"])
    model = load(tmp_path)
    ids = tokens(100)
    with torch.inference_mode():
        expected = theirs(ids.unsqueeze(0)).logits[0]
    torch.testing.assert_close(model.forward(ids, model.new_cache(128)), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 2, 5, 16, 33])
def test_prefill_in_chunks_equals_one_of_all(ours: Transformer, chunk: int) -> None:
    ids = tokens(67)
    whole = ours.forward(ids, ours.new_cache(300))
    cache = ours.new_cache(300)
    parts = [ours.forward(part, cache) for part in ids.split(chunk)]
    assert cache.length == 67
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=TOLERANCE)


def test_the_last_logits_alone_are_those_of_the_last_token(ours: Transformer) -> None:
    ids = tokens(20)
    whole = ours.forward(ids, ours.new_cache(300))
    last = ours.forward(ids, ours.new_cache(300), last_only=True)
    assert last.shape == (1, VOCABULARY)
    torch.testing.assert_close(last, whole[-1:], rtol=0, atol=TOLERANCE)


def test_the_last_logits_are_right_where_the_head_takes_rows_in_a_form_of_its_own(ours: Transformer) -> None:
    """As packed heads on a GPU do, whose form of activations depends on how many rows there are."""
    base = ours.weights.head

    class Head:
        nbytes = base.nbytes

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return base(x.T)

    class OwnForm:
        def __getattr__(self, name: str) -> Any:
            return getattr(reference, name)

        def norm(self, x: torch.Tensor, norm: Norm, into: Weight) -> torch.Tensor:
            y = reference.norm(x, norm, into)
            return y.T if isinstance(into, Head) else y

        def add_norm(self, x: torch.Tensor, out: torch.Tensor, post: Norm | None, norm: Norm, into: Weight) -> Any:
            y = reference.add_norm(x, out, post, norm, into)
            return y.T if isinstance(into, Head) else y

    model = replace(ours, ops=OwnForm(), weights=replace(ours.weights, head=Head()))
    for ids in (tokens(20), tokens(1)):
        whole = ours.forward(ids, ours.new_cache(300))
        torch.testing.assert_close(model.forward(ids, model.new_cache(300)), whole, rtol=0, atol=TOLERANCE)
        last = model.forward(ids, model.new_cache(300), last_only=True)
        torch.testing.assert_close(last, whole[-1:], rtol=0, atol=TOLERANCE)


def test_truncating_and_extending_equals_a_fresh_cache_bit_for_bit(ours: Transformer) -> None:
    kept, dropped, added = tokens(30), tokens(20, seed=1), tokens(11, seed=2)
    used, fresh = ours.new_cache(300), ours.new_cache(300)
    ours.forward(kept, used)
    ours.forward(dropped, used)
    used.truncate(len(kept))
    ours.forward(kept, fresh)
    assert torch.equal(ours.forward(added, used), ours.forward(added, fresh))


def test_a_step_has_the_logits_of_the_tokens_that_are_asked_for(ours: Transformer) -> None:
    ids, cache = tokens(9), ours.new_cache(300)
    cache.reserve(9)
    whole = ours.step(ids, cache, last_only=False)
    for places in ([8], [2, 5]):
        some = ours.step(ids, cache, last_only=False, places=torch.tensor(places))
        torch.testing.assert_close(some, whole[places], rtol=0, atol=TOLERANCE)


def test_the_same_steps_give_the_same_bits(ours: Transformer) -> None:
    ids = tokens(40)
    caches = [ours.new_cache(300), ours.new_cache(300)]
    runs = [[ours.forward(part, cache) for part in (ids[:30], *ids[30:].split(1))] for cache in caches]
    assert torch.equal(torch.cat(runs[0]), torch.cat(runs[1]))


def test_pages_of_the_cache_join_without_a_seam(ours: Transformer) -> None:
    """Past 256 tokens a second page is written; a window hides the seam of half the layers, not of the others."""
    ids = tokens(300)
    whole = ours.forward(ids, ours.new_cache(512))
    cache = ours.new_cache(512)
    ours.forward(ids[:250], cache)
    steps = [ours.forward(token.view(1), cache) for token in ids[250:262]]
    torch.testing.assert_close(torch.cat(steps), whole[250:262], rtol=0, atol=TOLERANCE)


def test_a_full_cache_refuses_and_stays_as_it_was(ours: Transformer) -> None:
    cache = ours.new_cache(32)
    ours.forward(tokens(30), cache)
    with pytest.raises(ContextError, match="33 tokens do not fit the context of 32"):
        ours.forward(tokens(3), cache)
    assert cache.length == 30
    ours.forward(tokens(2), cache)
    assert cache.length == cache.capacity == 32


@pytest.mark.parametrize("norm_shape", ["[H, D]", "[H * D]"])
def test_head_norms_stored_once_per_head_load_alike(tmp_path: Path, norm_shape: str) -> None:
    """Some EXL2 files keep Qwen3's q and k norms expanded over the heads."""
    make_model(tmp_path, "Qwen3", {})
    plain = load(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name, tensor in stored.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            expanded = tensor.expand(6 if "q_norm" in name else 2, -1).contiguous()
            stored[name] = expanded if norm_shape == "[H, D]" else expanded.view(-1)
    save_file(stored, tmp_path / "model.safetensors")
    ids = tokens(12)
    assert torch.equal(load(tmp_path).forward(ids, plain.new_cache(16)), plain.forward(ids, plain.new_cache(16)))
