"""What a user may call a model: paths, hub references, bitrates; downloads by huggingface_hub, without a network."""

import errno
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from exl2chat.errors import ModelError
from exl2chat.model import smollm2
from exl2chat.model.bitrate import Bitrate, choose_branch, parse_bitrate
from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.model.dequant import dequantize
from exl2chat.model.folder import MAX_JSON
from exl2chat.model.hub import local_models, resolve
from exl2chat.model.hub_client import Hub, is_complete
from exl2chat.paths import Paths
from exl2chat.progress import silent
from tests.model import fake_hub
from tests.model.fake_hub import FakeHub

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "llama-fp16"
CONFIG = json.dumps({"quantization_config": {"quant_method": "exl2", "bits": 4.0}}).encode()
MODEL = {
    "config.json": CONFIG,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
    "output.safetensors": b"weights" * 1000,
}
UNWANTED = {
    "README.md": b"#",
    "pytorch_model.bin": b"pickle",
    "model.pt": b"pickle",
    "modeling.py": b"code",
    "onnx/config.json": b"{}",
    "original/a.safetensors": b"again",
    "consolidated.safetensors": b"again",
}
REPOS = {
    "org/plain": {"main": {**MODEL, **UNWANTED}, "8.0bpw": {**MODEL, "config.json": b"{}"}},
    "org/branches": {
        "main": {"measurement.json": b"{}", "config.json": CONFIG},
        "3.0bpw": {**MODEL, "output.safetensors": b"3"},
        "4_0": {**MODEL, "output.safetensors": b"4"},
        "5.8bpw_h8": {**MODEL, "output.safetensors": b"5.8"},
        "6.0bpw_h6": {**MODEL, "output.safetensors": b"6h6"},
        "6.0bpw_h8": {**MODEL, "output.safetensors": b"6h8"},
    },
    "org/pickled": {"main": {"config.json": CONFIG, "pytorch_model.bin": b"pickle"}},
    "org/large": {"main": {"config.json": CONFIG, "output.safetensors": bytes(range(256)) * 90_000}},
    "org/shards": {
        "main": {
            "config.json": CONFIG,
            "output-00001-of-00002.safetensors": b"first",
            "output-00002-of-00002.safetensors": b"second",
        }
    },
}


@pytest.fixture(scope="module")
def running() -> Iterator[FakeHub]:
    with fake_hub.serving(REPOS) as server:
        yield server


@pytest.fixture
def server(running: FakeHub) -> FakeHub:
    running.refusal = None
    running.requests.clear()
    running.ranges.clear()
    return running


@pytest.fixture
def client(server: FakeHub, tmp_path: Path) -> Hub:
    return Hub(server.endpoint, tmp_path / "hub")


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths.default(tmp_path / "home")


# --- paths


def test_a_folder_is_used_as_it_is(paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve(str(tmp_path), paths, silent) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name", paths, silent) == Path("org/name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/org", paths, silent) == tmp_path / "org"


@pytest.mark.parametrize("reference", ["/no/such/folder", "./nothing", "../nothing", "~/nothing", "~nobody-at-all/x"])
def test_a_path_to_nothing_is_said_to_be_one(reference: str, paths: Paths) -> None:
    with pytest.raises(ModelError, match="there is no such"):
        resolve(reference, paths, silent)


def test_a_name_too_long_for_a_folder_is_said_to_be(paths: Paths) -> None:
    with pytest.raises(ModelError, match="File name too long"):
        resolve("a" * 300, paths, silent)


def test_a_file_is_not_a_model(paths: Paths, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="is a file") as fault:
        resolve(str(tmp_path / "model.safetensors"), paths, silent)
    assert "folder" in fault.value.remedy


@pytest.mark.parametrize("reference", ["", "llama", "a/b/c", "org/name@", "org/name:", "org/na me", "http://x/y"])
def test_what_is_neither_path_nor_reference(reference: str, paths: Paths, client: Hub) -> None:
    with pytest.raises(ModelError):
        resolve(reference, paths, silent, client)


# --- bitrates


@pytest.mark.parametrize(
    ("name", "bits", "head"),
    [
        ("4.0bpw", 4.0, None),
        ("4_0", 4.0, None),
        ("5.8bpw_h8", 5.8, 8),
        ("3.80bpw_H6", 3.8, 6),
        ("4.0bpw_h6", 4.0, 6),
        ("6bpw", 6.0, None),
        ("4.25bpw-h6-exl2", 4.25, 6),
    ],
)
def test_spellings_of_bitrates(name: str, bits: float, head: int | None) -> None:
    assert parse_bitrate(name) == Bitrate(bits, head)


@pytest.mark.parametrize("name", ["main", "gptq-4bit-32g-actorder_True", "v4.0", "refs/pr/4", "4.0bpw_x"])
def test_other_names_are_no_bitrates(name: str) -> None:
    assert parse_bitrate(name) is None


@pytest.mark.parametrize(
    ("wish", "branch"),
    [
        ("4.0bpw", "4_0"),
        ("4bpw", "4_0"),
        ("3.0bpw", "3.0bpw"),
        ("5.8bpw", "5.8bpw_h8"),
        ("6.0bpw_h8", "6.0bpw_h8"),
        ("6_0-h6", "6.0bpw_h6"),
        ("4.15bpw", "4_0"),
        ("main", "main"),
    ],
)
def test_the_branch_of_a_bitrate(wish: str, branch: str) -> None:
    assert choose_branch("org/branches", wish, list(REPOS["org/branches"])) == branch


@pytest.mark.parametrize(
    ("wish", "message", "remedy"),
    [
        ("6.0bpw", "several branches", "6.0bpw_h6, 6.0bpw_h8"),
        ("8.0bpw", "no branch near 8.0bpw", "main, 3.0bpw, 4_0"),
        ("4.0bpw_h8", "no branch near", "4_0"),
        ("best", "not a bitrate", "@"),
    ],
)
def test_bitrates_that_name_no_one_branch(wish: str, message: str, remedy: str) -> None:
    with pytest.raises(ModelError, match=message) as fault:
        choose_branch("org/branches", wish, list(REPOS["org/branches"]))
    assert remedy in fault.value.remedy


# --- downloads


def test_a_download_fetches_what_is_wanted_and_nothing_else(client: Hub, server: FakeHub, paths: Paths) -> None:
    calls = []
    folder = resolve("org/plain", paths, lambda *call: calls.append(call), client)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == MODEL
    fetched = {request.rsplit("/", 1)[1] for request in server.requests if "/resolve/" in request}
    assert fetched == MODEL.keys()
    size = sum(map(len, MODEL.values()))
    assert calls[-1] == ("downloading org/plain", size, size, "B")


def test_a_model_in_the_cache_needs_no_network(client: Hub, server: FakeHub, paths: Paths) -> None:
    first = [resolve(reference, paths, silent, client) for reference in ("org/plain", "org/branches:4.0bpw")]
    server.requests.clear()
    stages = []
    again = [
        resolve(reference, paths, lambda *call: stages.append(call), client)
        for reference in ("org/plain", "org/branches:4bpw")
    ]
    assert again == first
    assert (server.requests, stages) == ([], [])


def test_revisions_and_bitrates_choose_the_branch(client: Hub, paths: Paths) -> None:
    def weights(reference: str) -> bytes:
        return (resolve(reference, paths, silent, client) / "output.safetensors").read_bytes()

    assert weights("org/branches@3.0bpw") == b"3"
    assert weights("org/branches:4.0bpw") == b"4"
    assert weights("org/branches:5.8bpw") == b"5.8"
    assert weights("org/branches:6.0bpw_h8") == b"6h8"
    assert weights("org/branches@" + fake_hub.commit("org/branches", "6.0bpw_h6")) == b"6h6"


def test_a_download_that_failed_is_not_used_and_goes_on(client: Hub, server: FakeHub, paths: Paths) -> None:
    server.missing = {"output-00002-of-00002.safetensors"}
    with pytest.raises(ModelError):
        resolve("org/shards", paths, silent, client)
    assert client.cached("org/shards", "main") is None
    assert local_models(paths, client) == []
    server.missing = set()
    server.requests.clear()
    folder = resolve("org/shards", paths, silent, client)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == REPOS["org/shards"]["main"]
    fetched = [request for request in server.requests if request.startswith("GET /org")]
    assert [request.rsplit("/", 1)[1] for request in fetched] == ["output-00002-of-00002.safetensors"]


def test_a_connection_that_broke_is_taken_up_where_it_was(client: Hub, server: FakeHub, paths: Paths) -> None:
    """The library writes pieces of 10 MiB; half of the file is one of them and a bit, which is lost."""
    server.cut = {"output.safetensors"}
    folder = resolve("org/large", paths, silent, client)
    assert (folder / "output.safetensors").read_bytes() == REPOS["org/large"]["main"]["output.safetensors"]
    assert server.ranges == [f"bytes={10 << 20}-"]


def test_an_exception_out_of_the_progress_ends_the_download(client: Hub, paths: Paths) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(_stage: str, done: int = 0, _total: int = 0, _unit: str = "") -> None:
        if done:
            raise Interrupted

    with pytest.raises(Interrupted):
        resolve("org/plain", paths, interrupt, client)
    assert client.cached("org/plain", "main") is None
    assert is_complete(resolve("org/plain", paths, silent, client))


@pytest.mark.parametrize(
    ("reference", "refusal", "message", "remedy"),
    [
        ("org/absent", None, "no public repository org/absent", "check the name"),
        ("org/branches@5.0bpw", None, "no branch, tag or commit 5.0bpw", "main, 3.0bpw, 4_0"),
        ("org/branches", None, "no complete safetensors model in its branch main", "other branches: 3.0bpw"),
        ("org/pickled", None, "no complete safetensors model", "EXL2 or GPTQ"),
        ("org/branches:6.0bpw", None, "several branches", "6.0bpw_h8"),
        ("org/plain", (401, "GatedRepo"), "org/plain is gated", "hf auth login"),
        ("org/plain", (403, ""), "answered 403", "hf auth login"),
        ("org/plain", (401, "RepoNotFound"), "no public repository", "hf auth login"),
        ("org/plain:4.0bpw", (500, ""), "answered 500", "try again later"),
        ("-org/plain", None, "cannot be a repository's name", "organisation/name"),
    ],
)
def test_refusals_are_one_clear_line(
    reference: str,
    refusal: tuple[int, str] | None,
    message: str,
    remedy: str,
    client: Hub,
    server: FakeHub,
    paths: Paths,
) -> None:
    server.refusal = refusal
    with pytest.raises(ModelError, match=message) as fault:
        resolve(reference, paths, silent, client)
    assert remedy in fault.value.remedy
    assert "\n" not in str(fault.value)


def test_no_network_is_one_clear_line(paths: Paths, tmp_path: Path) -> None:
    nobody = Hub("http://127.0.0.1:9", tmp_path / "hub")
    for reference in ("org/plain", "org/plain:4.0bpw"):
        with pytest.raises(ModelError, match="the hub cannot be reached for org/plain"):
            resolve(reference, paths, silent, nobody)
    with pytest.raises(ModelError, match="cannot be reached"):
        nobody.probe("org/plain")


def test_what_a_server_says_is_not_printed(
    client: Hub, server: FakeHub, paths: Paths, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "handlers", [caplog.handler])
    monkeypatch.setattr(server, "warning", "clipboard; \x1b]52;c;aGk=\x07")
    resolve("org/plain", paths, silent, client)
    assert caplog.text == ""


def test_a_full_disk_is_one_clear_line(client: Hub, paths: Paths) -> None:
    def full(_stage: str, done: int = 0, _total: int = 0, _unit: str = "") -> None:
        if done:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ModelError, match="the disk is full") as fault:
        resolve("org/plain", paths, full, client)
    assert "HF_HOME" in fault.value.remedy


# --- what is here


def test_local_models_are_the_complete_quantised_ones(client: Hub, paths: Paths) -> None:
    assert local_models(paths, client) == []
    expected = {name: resolve(name, paths, silent, client) for name in ("org/branches@3.0bpw", "org/plain")}
    resolve("org/plain@8.0bpw", paths, silent, client)  # not quantised, by its config
    assert dict(local_models(paths, client)) == expected
    default = paths.models / smollm2.FOLDER
    default.mkdir(parents=True)
    assert local_models(paths, client)[0] == ("smollm2", default)
    with (expected["org/plain"] / "config.json").open("a") as file:
        file.write(" " * MAX_JSON)  # more than is ever read
    assert "org/plain" not in dict(local_models(paths, client))


@pytest.mark.parametrize(
    ("names", "complete"),
    [
        (["config.json", "output.safetensors"], True),
        (["config.json"], False),
        (["output.safetensors"], False),
        (["config.json", "output-00001-of-00002.safetensors"], False),
        (["config.json", "output-00001-of-00002.safetensors", "output-00002-of-00002.safetensors"], True),
    ],
)
def test_a_folder_is_complete_by_its_file_names(names: list[str], complete: bool, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert is_complete(tmp_path) is complete


def bfloat16_weights() -> tuple[bytes, dict[str, np.ndarray]]:
    """The golden model's weights cut to bfloat16: a safetensors file, and their float32 values."""
    header, data, truth = {}, b"", {}
    for name, value in load_file(GOLDEN / "model.safetensors").items():
        bits = (value.astype(np.float32).view(np.uint32) >> 16).astype("<u2")
        truth[name] = (bits.astype(np.uint32) << 16).view(np.float32)
        header[name] = {"dtype": "BF16", "shape": value.shape, "data_offsets": [len(data), len(data) + bits.nbytes]}
        data += bits.tobytes()
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data, truth


def test_the_default_model_comes_from_the_hub_where_it_can(paths: Paths, tmp_path: Path) -> None:
    """The original checkpoint is in bfloat16; its files are copied, and its sampling is the model card's."""
    weights, truth = bfloat16_weights()
    names = ("config.json", "tokenizer.json", "tokenizer_config.json")
    files = {name: (GOLDEN / name).read_bytes() for name in names} | {"model.safetensors": weights}
    with fake_hub.serving({smollm2.REPOSITORY: {"main": files}}) as server:
        folder = resolve("smollm2", paths, silent, Hub(server.endpoint, tmp_path / "hub"))
    assert folder == paths.models / smollm2.FOLDER
    assert (folder / "tokenizer.json").read_bytes() == files["tokenizer.json"]
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.sampling == {"temperature": 0.2, "top_p": 0.9}
    for linear in (*checkpoint.layers[1].linears, checkpoint.head):
        weight = truth[f"{linear.key}.weight"].T
        decoded = dequantize(linear).astype(np.float32)
        assert np.sqrt(((decoded - weight) ** 2).mean() / (weight**2).mean()) < 0.0075
