"""Small tokenizers of every kind that chat models use, trained here on a few lines: under a tenth of a second each."""

import functools
import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from exl2chat.model.folder import ModelFolder, open_folder

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
CORPUS = [
    "Hello world, this is a test of the system.",
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "def f(x):\n    return x + 1  # <b>bold</b>",
    "Ünïcödé ist schön; naïve café über alles.",
    "日本語のテキストと العربية and emoji 😀👩‍👩‍👧 too.",
    "assistant user system think im_start im_end INST end",
] * 20
TEXTS = [
    "Hello world",
    " leading and trailing  ",
    "two\n\nlines\tand   spaces",
    "日本語 العربية naïve 😀👩‍👩‍👧 e\u0301",
    "code: `x < y | z` [a] <b>bold</b> \"q\" 'r'",
    "½ ﬁ Ⅷ \u00a0nbsp \ufeffbom \u200bzero",
]
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<think>", "</think>", "[INST]"]
CHATML = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>", "chat_template": CHATML}


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen, SmolLM2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(tokenizer, trainers.BpeTrainer(vocab_size=600, show_progress=False, initial_alphabet=alphabet))


def llama2() -> Tokenizer:
    """BPE with byte fallback behind the old normaliser, which puts a space before every piece of text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return _trained(tokenizer, trainers.BpeTrainer(vocab_size=600, show_progress=False, max_token_length=8), _bytes())


def phi3() -> Tokenizer:
    """The same with Metaspace, a prefix at the very start only, and control tokens that swallow the space behind."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return _trained(tokenizer, trainers.BpeTrainer(vocab_size=600, show_progress=False, max_token_length=8), _bytes())


def gemma() -> Tokenizer:
    """No space in front; runs of newlines and of the space mark are added tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _trained(tokenizer, trainers.BpeTrainer(vocab_size=600, show_progress=False, max_token_length=8), _bytes())


def unigram() -> Tokenizer:
    """Unigram behind NFKC; its control tokens stand in the vocabulary and match normalised text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, show_progress=False, unk_token="<unk>")
    return _trained(tokenizer, trainer)


HUGGINGFACE = {"byte_level": byte_level, "llama2": llama2, "phi3": phi3, "gemma": gemma, "unigram": unigram}
SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "spm_bpe": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
    "spm_unigram": {"model_type": "unigram", "byte_fallback": True, "vocab_size": 600},
    "spm_no_prefix": {"model_type": "bpe", "add_dummy_prefix": False, "normalization_rule_name": "identity"},
}
KINDS = [*HUGGINGFACE, *SENTENCEPIECE, "golden"]


def _bytes() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def _trained(tokenizer: Tokenizer, trainer: Any, more: list[str] | None = None) -> Tokenizer:
    trainer.special_tokens = SPECIALS + (more or [])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@functools.cache
def tokenizer_json(kind: str) -> str:
    """The file, with byte tokens made ordinary ones and the added tokens as models have them."""
    description = json.loads(HUGGINGFACE[kind]().to_str())
    kept = [token for token in description["added_tokens"] if not token["content"].startswith("<0x")]
    size = max(token["id"] for token in description["added_tokens"]) + 1
    size = max(size, len(description["model"]["vocab"]))
    extra = ADDED + (["\n\n", "▁▁"] if kind == "gemma" else [])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    vocabulary = description["model"]["vocab"]
    for content in extra:
        if isinstance(vocabulary, dict) and content in vocabulary:
            token_id = vocabulary[content]
        else:
            token_id, size = size, size + 1
        kept.append({**flags, "id": token_id, "content": content})
    for token in kept:
        token["normalized"] = kind == "unigram"
        token["rstrip"] = kind == "phi3" and token["content"] == "<|im_end|>"
    description["added_tokens"] = sorted(kept, key=lambda token: token["id"])
    return json.dumps(description, ensure_ascii=False)


@functools.cache
def sentencepiece_model(kind: str) -> bytes:
    options = {"vocab_size": 500, "remove_extra_whitespaces": False, "hard_vocab_limit": False, "minloglevel": 2}
    symbols = {"control_symbols": ["<|im_start|>", "<|im_end|>"], "user_defined_symbols": ["[INST]", "<think>"]}
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, **{**options, **symbols, **SENTENCEPIECE[kind]}
    )
    return model.getvalue()


def write_tokenizer(folder: Path, kind: str, **config: Any) -> ModelFolder:
    """A folder with the tokenizer `kind`, its tokenizer_config.json (changed by `config`) and a ChatML template."""
    if kind == "golden":
        source = GOLDEN / "qwen2-4.0bpw-exl2"
        (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
        base = json.loads((source / "tokenizer_config.json").read_text()) | {"chat_template": CHATML}
    elif kind in HUGGINGFACE:
        (folder / "tokenizer.json").write_text(tokenizer_json(kind), "utf-8")
        base = CONFIG
    else:
        (folder / "tokenizer.model").write_bytes(sentencepiece_model(kind))
        base = CONFIG
    (folder / "tokenizer_config.json").write_text(json.dumps({**base, **config}), "utf-8")
    return open_folder(folder)
