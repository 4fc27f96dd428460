"""Command-line options of scripts that load a model: `add_args`, `check_args`, `print_options`, `init`."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from exl2chat.errors import UsageError
from exl2chat.exllamav2.cache import ExLlamaV2Cache
from exl2chat.exllamav2.config import ExLlamaV2Config
from exl2chat.exllamav2.model import ExLlamaV2
from exl2chat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exl2chat.exllamav2.unsupported import refuse_set

NO_CHANGE = "changes nothing here"
OPTIONS: tuple[tuple[str, str, type, str], ...] = (
    ("-m", "--model_dir", str, "folder of the model"),
    ("-gs", "--gpu_split", str, '"auto": load where there is room'),
    ("-l", "--length", int, "longest context in tokens"),
    ("-rs", "--rope_scale", float, "linear RoPE scale"),
    ("-ra", "--rope_alpha", float, "NTK RoPE alpha"),
    ("-ry", "--rope_yarn", float, "YaRN RoPE scale (not supported yet)"),
    ("-ept", "--experts_per_token", int, "experts of a mixture (not supported yet)"),
    ("-chunk", "--chunk_size", int, "tokens of a prompt read at a time"),
)
FLAGS = (
    ("-tp", "--tensor_parallel", "split every layer over GPUs (not supported)"),
    ("-nfa", "--no_flash_attn", NO_CHANGE),
    ("-nxf", "--no_xformers", NO_CHANGE),
    ("-nsdpa", "--no_sdpa", NO_CHANGE),
    ("-ng", "--no_graphs", NO_CHANGE),
    ("-lm", "--low_mem", "read prompts in smaller chunks"),
    ("-lq4", "--load_q4", "quantise while loading (not supported yet)"),
    ("-fst", "--fast_safetensors", NO_CHANGE),
    ("-ic", "--ignore_compatibility", NO_CHANGE),
)


def add_args(parser: ArgumentParser) -> None:
    """Add the options."""
    for short, name, kind, text in OPTIONS:
        parser.add_argument(short, name, type=kind, help=text)
    for short, name, text in FLAGS:
        parser.add_argument(short, name, action="store_true", help=text)


def check_args(args: Namespace) -> None:
    """End the script where there is no model folder; what is in it is checked when it is read."""
    if not args.model_dir or not Path(args.model_dir).is_dir():
        sys.exit(f" ## Error: no model folder {args.model_dir or ''} (name one with -m)")


def print_options(args: Namespace) -> None:
    """Print what was asked for."""
    names = [*(name for _, name, _, _ in OPTIONS), *(name for _, name, _ in FLAGS)]
    values = {name: getattr(args, name.removeprefix("--")) for name in names[1:]}
    given = [name if value is True else f"{name} {value}" for name, value in values.items() if value]
    print(f" -- Model: {args.model_dir}")
    print(f" -- Options: {' '.join(given)}")


def init(
    args: Namespace,
    quiet: bool = False,
    allow_auto_split: bool = False,
    skip_load: bool = False,
    benchmark: bool = False,  # noqa: ARG001
    max_batch_size: int | None = None,
    max_input_len: int | None = None,
    max_output_len: int | None = None,
    progress: bool = False,
    **kwargs: Any,
) -> tuple[ExLlamaV2, ExLlamaV2Tokenizer]:
    """The model and its tokenizer. Loaded, unless `skip_load`, or -gs auto leaves that to load_autosplit."""
    refuse_set("model_init", tensor_parallel=args.tensor_parallel, rope_yarn=args.rope_yarn, **kwargs)
    refuse_set("model_init", experts_per_token=args.experts_per_token)
    config = ExLlamaV2Config(args.model_dir)
    config.max_seq_len = args.length or config.max_seq_len
    config.scale_pos_emb, config.scale_alpha_value = args.rope_scale, args.rope_alpha
    config.max_batch_size = max_batch_size or config.max_batch_size
    config.max_input_len = args.chunk_size or max_input_len or config.max_input_len
    config.max_output_len = max_output_len
    config.load_in_q4 = args.load_q4
    if args.low_mem:
        config.set_low_mem()
    model = ExLlamaV2(config)
    if not skip_load:
        post_init_load(model, args, quiet, allow_auto_split, progress)
    return model, ExLlamaV2Tokenizer(config)


def post_init_load(
    model: ExLlamaV2,
    args: Namespace,
    quiet: bool = False,
    allow_auto_split: bool = False,
    progress: bool = False,
    expect_cache_tokens: int = 0,  # noqa: ARG001
    expect_cache_base: type[ExLlamaV2Cache] | None = None,  # noqa: ARG001
) -> None:
    """Load the model, unless -gs auto leaves that to load_autosplit. UsageError where the script does not allow it."""
    if args.gpu_split == "auto":
        if not allow_auto_split:
            raise UsageError("-gs auto: the script does not load its model that way", "leave it out")
        return
    refuse_set("model_init", gpu_split=args.gpu_split)
    if not quiet:
        print(" -- Loading model...")
    model.load(progress=progress)
