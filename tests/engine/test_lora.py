"""LoRAs against models that they were merged into in float64: every architecture and format, prompts and steps."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from exl2chat.engine.generators.streaming import StreamingGenerator
from exl2chat.engine.lora import Adapter, Scaled, cache_salt, load_adapter, with_adapters
from exl2chat.engine.transformer import Transformer
from exl2chat.errors import ModelError, UsageError
from exl2chat.model.checkpoint import Checkpoint, open_checkpoint
from exl2chat.model.dequant import dequantize
from exl2chat.model.quant import Linear
from exl2chat.model.tensors import read_float32
from exl2chat.model.tokenizer import open_tokenizer
from exl2chat.progress import silent
from exl2chat.settings import Sampling
from tests.engine.transformers_models import VARIANTS, load, make_model, tokens
from tests.model.lora_files import ALPHA, RANK, make_lora

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
PLAIN_SCALE = ALPHA / RANK
TOLERANCE = 1e-4
FAMILIES = ("llama", "llama-tied", "llama-biases", "qwen2", "qwen3", "gemma2", "phi3")


def shapes_of(model: Any) -> dict[str, tuple[int, int]]:
    """[out, in] of every linear module, the head too."""
    linears = ((name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return {name: tuple(module.weight.shape) for name, module in linears}


def merged_logits(model: Any, changes: dict[str, np.ndarray], ids: torch.Tensor) -> torch.Tensor:
    """Of `model` with the changes added to its weights, all in float64; the model stays as it was."""
    model.double()
    modules = dict(model.named_modules())
    before = {name: modules[name].weight for name in changes}
    for name, change in changes.items():
        # A head that is tied to the embedding gets a weight of its own.
        modules[name].weight = torch.nn.Parameter(before[name].detach() + torch.from_numpy(change))
    with torch.inference_mode():
        logits: torch.Tensor = model(ids.unsqueeze(0)).logits[0]
    for name, weight in before.items():
        modules[name].weight = weight
    return logits.float()


def check(model: Transformer, ids: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Logits of a prompt, and of the same tokens one by one, are those expected."""
    cache = model.new_cache(64)
    steps = [model.forward(ids[:9], cache), *(model.forward(token.view(1), cache) for token in ids[9:])]
    for logits in (model.forward(ids, model.new_cache(64)), torch.cat(steps)):
        torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_lora_of_every_linear_layer_equals_the_merged_model(variant: str, tmp_path: Path) -> None:
    theirs = make_model(tmp_path / "model", *VARIANTS[variant])
    products = make_lora(tmp_path / "lora", shapes_of(theirs))
    assert {name.rpartition(".")[2] for name in products} >= {"o_proj", "down_proj", "lm_head"}
    ours = load(tmp_path / "model")
    adapted = with_adapters(ours, [Scaled(load_adapter(tmp_path / "lora", ours))])
    ids = tokens(20)
    plain = ours.forward(ids, ours.new_cache(64))
    expected = merged_logits(theirs, {name: PLAIN_SCALE * p for name, p in products.items()}, ids)
    assert (expected - plain).abs().mean() > 0.1
    check(adapted, ids, expected, 2 * TOLERANCE)
    assert torch.equal(ours.forward(ids, ours.new_cache(64)), plain)  # which is as it was


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Transformer]:
    folder = tmp_path_factory.mktemp("llama")
    theirs = make_model(folder, *VARIANTS["llama"])
    return theirs, load(folder)


ONE = "model.layers.1.self_attn.v_proj"
OTHER = "model.layers.2.mlp.up_proj"


@pytest.mark.parametrize("module", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
def test_one_projection_alone_changes(module: str, llama: tuple[Any, Transformer], tmp_path: Path) -> None:
    theirs, ours = llama
    shapes = {name: shape for name, shape in shapes_of(theirs).items() if name.endswith(module)}
    products = make_lora(tmp_path, shapes)
    ids = tokens(15)
    expected = merged_logits(theirs, {name: PLAIN_SCALE * p for name, p in products.items()}, ids)
    check(with_adapters(ours, [Scaled(load_adapter(tmp_path, ours))]), ids, expected, TOLERANCE)


SCALINGS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "alpha / r": ({}, {ONE: ALPHA / RANK, OTHER: ALPHA / RANK}),
    "rslora": ({"use_rslora": True}, {ONE: ALPHA / math.sqrt(RANK), OTHER: ALPHA / math.sqrt(RANK)}),
    "alpha of a name": ({"alpha_pattern": {"v_proj": 2}}, {ONE: 2 / RANK, OTHER: ALPHA / RANK}),
    "alpha of a path": ({"alpha_pattern": {"layers.2.mlp.up_proj": 1}}, {ONE: ALPHA / RANK, OTHER: 1 / RANK}),
    "not part of a name": ({"alpha_pattern": {"proj": 9}}, {ONE: ALPHA / RANK, OTHER: ALPHA / RANK}),
    "the first pattern": ({"alpha_pattern": {"v_proj": 2, ONE: 7}}, {ONE: 2 / RANK, OTHER: ALPHA / RANK}),
    "a whole name": ({"alpha_pattern": {"^v_proj": 2, "^" + ONE + "$": 7}}, {ONE: 7 / RANK, OTHER: ALPHA / RANK}),
    "escaped dots": ({"alpha_pattern": {r"mlp\.up_proj": 4}}, {ONE: ALPHA / RANK, OTHER: 4 / RANK}),
    "rank of a name": ({"rank_pattern": {"up_proj": 5}}, {ONE: ALPHA / RANK, OTHER: ALPHA / 5}),
    "both, rslora": (
        {"rank_pattern": {"up_proj": 5}, "alpha_pattern": {"up_proj": 2}, "use_rslora": True},
        {ONE: ALPHA / math.sqrt(RANK), OTHER: 2 / math.sqrt(5)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SCALINGS)
def test_scaling_is_that_of_peft(case: str, llama: tuple[Any, Transformer], tmp_path: Path) -> None:
    theirs, ours = llama
    config, scales = SCALINGS[case]
    shapes = {name: shape for name, shape in shapes_of(theirs).items() if name in scales}
    ranks = {OTHER: 5} if "rank_pattern" in config else {}
    products = make_lora(tmp_path, shapes, ranks=ranks, **config)
    ids = tokens(12)
    expected = merged_logits(theirs, {name: scales[name] * p for name, p in products.items()}, ids)
    check(with_adapters(ours, [Scaled(load_adapter(tmp_path, ours))]), ids, expected, TOLERANCE)


def test_several_add_up_each_with_its_own_scale(llama: tuple[Any, Transformer], tmp_path: Path) -> None:
    theirs, ours = llama
    shapes = shapes_of(theirs)
    first = make_lora(tmp_path / "a", shapes, seed=1)
    second = make_lora(tmp_path / "b", {name: shapes[name] for name in (ONE, OTHER)}, seed=2)
    a, b = (load_adapter(tmp_path / name, ours) for name in "ab")
    ids = tokens(15)

    def expected(scale_a: float, scale_b: float) -> torch.Tensor:
        changes = {name: PLAIN_SCALE * scale_a * product for name, product in first.items()}
        for name, product in second.items():
            changes[name] = changes[name] + PLAIN_SCALE * scale_b * product
        return merged_logits(theirs, changes, ids)

    both = with_adapters(ours, [Scaled(a, 0.5), Scaled(b, -2)])
    check(both, ids, expected(0.5, -2), TOLERANCE)
    check(with_adapters(both, [Scaled(a)]), ids, expected(1, 0), 2 * TOLERANCE)  # in their place, not on top


# Formats


def reference(checkpoint: Checkpoint) -> Any:
    """A model of transformers with the weights that the checkpoint stands for."""
    config = transformers.AutoConfig.from_pretrained(checkpoint.folder.path)
    config._attn_implementation = "eager"
    config.tie_word_embeddings = False  # a quantised head is not the embedding
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()

    def matrix(linear: Linear) -> torch.Tensor:
        if linear.kind == "plain":
            return torch.from_numpy(read_float32(linear.tensors["weight"]))
        return torch.from_numpy(np.ascontiguousarray(dequantize(linear).T)).float()

    state = {"model.embed_tokens.weight": read_float32(checkpoint.embedding)}
    state |= {info.name: read_float32(info) for layer in checkpoint.layers for info in layer.norms.values()}
    state |= {checkpoint.final_norm.name: read_float32(checkpoint.final_norm)}
    tensors = {name: torch.from_numpy(value) for name, value in state.items()}
    for layer in checkpoint.layers:
        for fused, parts in (("qkv_proj", layer.qkv), ("gate_up_proj", layer.gate_up)):
            key = f"{parts[0].key.rpartition('.')[0]}.{fused}.weight"
            if key in model.state_dict():
                tensors[key] = torch.cat([matrix(part) for part in parts])
    for linear in (*(linear for layer in checkpoint.layers for linear in layer.linears), checkpoint.head):
        tensors[f"{linear.key}.weight"] = matrix(linear)[: config.vocab_size if linear is checkpoint.head else None]
        if "bias" in linear.tensors:
            tensors[f"{linear.key}.bias"] = torch.from_numpy(read_float32(linear.tensors["bias"]))
    missing, _ = model.load_state_dict(tensors, strict=False)
    assert all(name.endswith("bias") for name in missing)
    return model


@pytest.mark.parametrize(
    "name",
    [
        "llama-3.0bpw-exl2",
        "gemma2-4.0bpw-exl2",
        "qwen2-4.0bpw-exl2",
        "phi3-4.0bpw-exl2",
        "llama-gptq4-g128-asym",
        "llama-gptq4-g128-actorder-sym",
        "llama-fp16",
    ],
)
def test_quantised_weights_take_a_lora_as_their_exact_values_do(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(GOLDEN / name)
    theirs = reference(checkpoint)
    products = make_lora(tmp_path, shapes_of(theirs), size=0.1)
    ids = tokens(24)
    plain = merged_logits(theirs, {}, ids)
    expected = merged_logits(theirs, {name: PLAIN_SCALE * p for name, p in products.items()}, ids)
    largest = float(expected.abs().max())
    assert (expected - plain).abs().max() > 0.1 * largest
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 6e-3), (torch.bfloat16, 5e-2)):
        ours = Transformer.load(checkpoint, torch.device("cpu"), dtype, silent)
        adapted = with_adapters(ours, [Scaled(load_adapter(tmp_path, ours))])
        check(adapted, ids, expected, tolerance * largest)


# Switching


def greedy(generator: StreamingGenerator, ids: list[int], adapters: list[Scaled]) -> tuple[int, list[int]]:
    """(how many tokens were reused, the reply)."""
    generator.set_stop_conditions([])
    start = generator.begin_stream_ex(ids, Sampling(temperature=0), max_new_tokens=8, adapters=adapters)
    reply: list[int] = []
    while not (result := generator.stream_ex()).eos:
        reply += result.tokens
    return start.cached_tokens, [*reply, *result.tokens]


def test_replies_switch_and_a_prefix_is_reused_only_with_the_same_loras(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(GOLDEN / "llama-3.0bpw-exl2")
    model = Transformer.load(checkpoint, torch.device("cpu"), torch.float32, silent)
    tokenizer = open_tokenizer(checkpoint.folder)
    make_lora(tmp_path, shapes_of(reference(checkpoint)), size=0.05)
    adapter = load_adapter(tmp_path, model)
    ids = [5, 600, 7, 80, 9, 12, 14]

    def fresh(adapters: list[Scaled]) -> list[int]:
        """The likeliest token eight times, each from the whole sequence before it."""
        adapted, sequence = with_adapters(model, adapters), list(ids)
        for _ in range(8):
            logits = adapted.forward(torch.tensor(sequence), adapted.new_cache(64), last_only=True)
            sequence.append(int(logits[0, : tokenizer.vocab_size].argmax()))
        return sequence[len(ids) :]

    one, half, none = [Scaled(adapter)], [Scaled(adapter, 0.5)], []
    answers = [fresh(adapters) for adapters in (one, half, none)]
    assert len(set(map(tuple, answers))) == 3
    generator = StreamingGenerator(model, model.new_cache(64), tokenizer)
    for adapters, answer, cached in (
        (none, answers[2], 0), (one, answers[0], 0), (one, answers[0], 6), (half, answers[1], 0), (none, answers[2], 0),
        (none, answers[2], 6), ([Scaled(adapter, 0)], answers[2], 6),
    ):  # fmt: skip
        assert greedy(generator, ids, adapters) == (cached, answer)


def test_steps_with_loras_are_never_recorded(llama: tuple[Any, Transformer], tmp_path: Path) -> None:
    """A graph of the model without them would ignore them; one with them would outlive them."""
    theirs, ours = llama
    make_lora(tmp_path, shapes_of(theirs))
    recording = type("Recording", (), {"recorded_rows": 16})()
    on_gpu = Transformer(ours.config, ours.weights, ours.device, ours.dtype, recording)
    assert on_gpu.recorded_rows == 16
    adapted = with_adapters(on_gpu, [Scaled(load_adapter(tmp_path, ours))])
    assert adapted.recorded_rows == 0
    assert with_adapters(adapted, []).recorded_rows == 16


def test_without_loras_the_weights_are_the_very_same(llama: tuple[Any, Transformer], tmp_path: Path) -> None:
    theirs, ours = llama
    make_lora(tmp_path, {ONE: shapes_of(theirs)[ONE]})
    adapter = load_adapter(tmp_path, ours)
    adapted = with_adapters(ours, [Scaled(adapter)])
    assert with_adapters(ours, []) is ours
    assert with_adapters(adapted, [Scaled(adapter)]) is adapted
    again = with_adapters(adapted, [])
    assert again.adapters == ()
    for before, during, after in zip(ours.weights.layers, adapted.weights.layers, again.weights.layers, strict=True):
        assert after.qkv is before.qkv
        assert during.o is before.o
    assert adapted.weight_bytes == ours.weight_bytes + adapter.nbytes
    assert adapter.nbytes == 4 * RANK * sum(shapes_of(theirs)[ONE])


def test_the_key_of_a_page_knows_which_loras_and_how_much(llama: tuple[Any, Transformer], tmp_path: Path) -> None:
    theirs, ours = llama
    make_lora(tmp_path, {ONE: shapes_of(theirs)[ONE]})
    a, b = (load_adapter(tmp_path, ours) for _ in range(2))
    salts = [cache_salt(s) for s in ([], [Scaled(a)], [Scaled(b)], [Scaled(a, 0.5)], [Scaled(a), Scaled(b)])]
    assert len(set(salts)) == 5
    assert salts[0] == b""
    assert cache_salt([Scaled(a)]) == salts[1]


def test_a_lora_stays_with_its_model(llama: tuple[Any, Transformer], tmp_path: Path) -> None:
    theirs, ours = llama
    make_lora(tmp_path, {ONE: shapes_of(theirs)[ONE]})
    adapter = load_adapter(tmp_path, ours)
    other = Transformer.load(open_checkpoint(GOLDEN / "llama-fp16"), ours.device, ours.dtype, silent)
    with pytest.raises(UsageError, match="loaded for another model"):
        with_adapters(other, [Scaled(adapter)])
    with pytest.raises(UsageError, match="a number, not nan"):
        Scaled(adapter, math.nan)


def test_numbers_that_are_not_finite_are_refused(llama: tuple[Any, Transformer], tmp_path: Path) -> None:
    theirs, ours = llama
    make_lora(tmp_path, {ONE: shapes_of(theirs)[ONE]}, size=math.inf)
    with pytest.raises(ModelError, match=r"lora_A\.weight holds values that are not finite"):
        load_adapter(tmp_path, ours)


def test_what_does_not_fit_the_memory_is_not_read(
    llama: tuple[Any, Transformer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = llama
    make_lora(tmp_path, {ONE: shapes_of(theirs)[ONE]})
    needed = load_adapter(tmp_path, ours).nbytes
    monkeypatch.setattr("exl2chat.engine.lora.free_bytes", lambda _device: needed)
    assert isinstance(load_adapter(tmp_path, ours), Adapter)
    monkeypatch.setattr("exl2chat.engine.lora.free_bytes", lambda _device: needed - 1)
    with pytest.raises(ModelError, match="MiB are free"):
        load_adapter(tmp_path, ours)
