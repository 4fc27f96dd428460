"""Malformed headers, indexes and folders: (name, change to a copy of a golden model, what the message must say)."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exl2chat.model.tensors import INDEX, MAX_HEADER, MAX_TENSORS
from tests.model.malformed_config import BAD_JSON
from tests.model.malformed_tensors import DOWN, EMBEDDING, NORM
from tests.model.model_files import edit_header, edit_json, read_header, weights, write_raw

Change = Callable[[Path], object]


def header(change: Callable[[dict[str, Any]], object]) -> Change:
    return lambda folder: edit_header(folder, lambda table: (change(table), None)[1])


def entry(name: str, **fields: Any) -> Change:
    return header(lambda table: table[name].update(fields))


def raw_header(text: bytes | str) -> Change:
    data = text if isinstance(text, bytes) else text.encode()
    return lambda folder: write_raw(weights(folder), data, b"")


def claim_length(length: int) -> Change:
    return lambda folder: weights(folder).write_bytes(struct.pack("<Q", length) + weights(folder).read_bytes()[8:])


def cut(size: int) -> Change:
    """The weight file without its last `-size` bytes, or with its first `size` only."""
    return lambda folder: weights(folder).write_bytes(weights(folder).read_bytes()[:size])


def swap_spans(table: dict[str, Any]) -> None:
    """Two tensors of one size over the same bytes; the other bytes belong to none."""
    table[f"{DOWN}.q_weight"]["data_offsets"] = table["model.layers.1.mlp.down_proj.q_weight"]["data_offsets"]


def with_hole(folder: Path) -> None:
    table, data = read_header(weights(folder))
    last = max((value for key, value in table.items() if key != "__metadata__"), key=lambda v: v["data_offsets"])
    last["data_offsets"] = [offset + 8 for offset in last["data_offsets"]]
    write_raw(weights(folder), json.dumps(table).encode(), data + b"\0" * 8)


def twice_in_header(folder: Path) -> None:
    table, data = read_header(weights(folder))
    text = json.dumps(table)
    write_raw(weights(folder), (text[:-1] + f', "{NORM}": {json.dumps(table[NORM])}' + "}").encode(), data)


def rename(new: str) -> Change:
    return header(lambda table: table.update({new: table.pop(NORM)}))


EMPTY = {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]}
HEADER: list[tuple[str, Change, str]] = [
    ("empty file", cut(0), "the header says"),
    ("seven bytes", cut(7), "the header says"),
    ("length only", cut(8), "the header says"),
    ("half a header", cut(900), "the header says"),
    ("half the data", cut(200_000), "bytes long"),
    ("one byte short", cut(-1), "bytes long"),
    ("one byte more", lambda folder: weights(folder).open("ab").write(b"\0"), "bytes long"),
    ("header of 0 bytes", claim_length(0), "is not JSON"),
    ("header longer than the file", claim_length(1 << 24), "the header says"),
    ("header of 2^63 bytes", claim_length(1 << 63), "the header says"),
    ("header over the cap", raw_header(b" " * (MAX_HEADER + 1)), "the header says"),
    ("too many tensors", raw_header(json.dumps({f"t{i}": EMPTY for i in range(MAX_TENSORS + 1)})), "more than 50000"),
    *((f"header {text[:20]!r}", raw_header(text), says) for text, says in BAD_JSON if text),
    ("header is not a table of tables", raw_header('{"x": 1}'), "dtype None"),
    ("no tensors", raw_header("{}"), "no file holds"),
    ("twice in the header", twice_in_header, "there twice"),
    ("overlap", header(swap_spans), "starts at byte"),
    ("hole", with_hole, "starts at byte"),
    *((f"dtype {value!r}", entry(NORM, dtype=value), "dtype") for value in ("F4", "f16", 16, None, ["F16"], "")),
    ("wrong dtype for the bytes", entry(NORM, dtype="F32"), "does not take 512 bytes"),
    *(
        (f"shape {value!r}", entry(NORM, shape=value), "tensor model.layers.0.input_layernorm.weight")
        for value in (
            None, 256, "256", [255], [-256], [256.0], [True], [-1, -256], [1 << 62, 4], [1] * 5, [1] * 100_000, [[256]],
        )
    ),
    *(
        (f"span {value!r}", entry(NORM, data_offsets=value), "tensor model.layers.0.input_layernorm.weight")
        for value in (None, [], [0], [0, 512, 512], [512, 0], [-512, 0], [0.0, 512.0], ["0", "512"], [1 << 50, 1 << 51])
    ),
    *(
        (f"name {name[:20]!r}", rename(name), "a tensor is called")
        for name in ("a/b", "../x", "a b", "a\nb", "a\x1b[2Jb", "\x00", "é", "x" * 257, "")
    ),
]  # fmt: skip


def raw_json(text: str | bytes, file: str = "config.json") -> Change:
    return lambda folder: (folder / file).write_bytes(text if isinstance(text, bytes) else text.encode())


def shard(folder: Path, weight_map: object, *files: str) -> None:
    """Moves the weights to model-1.safetensors, copies them to further `files`, and writes an index."""
    data = weights(folder).read_bytes()
    weights(folder).unlink()
    for name in ("model-1.safetensors", *files):
        (folder / name).write_bytes(data)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def indexed(weight_map: object, *files: str) -> Change:
    return lambda folder: shard(folder, weight_map, *files)


def swap_for(name: str, make: Callable[[Path], object]) -> Change:
    """The file `name` (or the weights) replaced by what `make` puts at its path."""

    def change(folder: Path) -> None:
        path = folder / name if name == "config.json" else weights(folder)
        path.unlink()
        make(path)

    return change


def leave_nothing(_path: Path) -> None: ...


GOOD = {NORM: "model-1.safetensors"}
FOLDER: list[tuple[str, Change, str]] = [
    ("no config", swap_for("config.json", leave_nothing), "there is no config.json"),
    ("no weights", swap_for("weights", leave_nothing), "there is no .safetensors"),
    ("config is a folder", swap_for("config.json", Path.mkdir), "config.json: is not a regular file"),
    ("weights are a folder", swap_for("weights", Path.mkdir), "is not a regular file"),
    ("config leads out", swap_for("config.json", lambda p: p.symlink_to("/etc/hostname")), "leads out"),
    ("config leads up", swap_for("config.json", lambda p: p.symlink_to("../..")), "leads out"),
    ("config leads nowhere", swap_for("config.json", lambda p: p.symlink_to("gone")), "leads nowhere"),
    ("config leads to itself", swap_for("config.json", lambda p: p.symlink_to("config.json")), "leads nowhere"),
    ("weights lead out", swap_for("weights", lambda p: p.symlink_to("/bin/sh")), "leads out"),
    *(
        (f"only {name}", swap_for("weights", lambda p, n=name: p.with_name(n).write_bytes(b"\x80\x04.")), "pickled")
        for name in ("pytorch_model.bin", "model.pt", "model.pth", "last.ckpt", "weights.pkl", "MODEL.BIN")
    ),
    *(
        (f"only {name}", swap_for("weights", lambda p, name=name: p.with_name(name).write_bytes(b"PK")), "there is no")
        for name in ("model.zip", "model.nemo", "model.tar.gz", "modeling_x.py", "model.gguf")
    ),
    ("too many tensors in two files", lambda f: write_raw(f / "more.safetensors", json.dumps(
        {f"t{i}": EMPTY for i in range(MAX_TENSORS)}).encode(), b""), "more than 50000"),
    ("tensors in two files", lambda f: (f / "copy.safetensors").write_bytes(weights(f).read_bytes()), "is also in"),
    *((f"config {text[:20]!r}", raw_json(text), says) for text, says in BAD_JSON),
    *((f"generation {text[:20]!r}", raw_json(text, "generation_config.json"), says) for text, says in BAD_JSON[:4]),
    *((f"index {text[:20]!r}", raw_json(text, INDEX), says) for text, says in BAD_JSON[:4]),
    ("quantize_config is bad", lambda folder: (
        edit_json(folder, {"quantization_config": ...}), raw_json("{", "quantize_config.json")(folder)), "is not JSON"),
    ("index without a map", raw_json("{}", INDEX), "weight_map is missing"),
    *((f"index map {value!r}", indexed(value), "weight_map") for value in (None, 3, [], {}, "model-1.safetensors")),
    *(
        (f"index names {name!r}", indexed(GOOD | {EMBEDDING: name}), "weight_map names")
        for name in (
            "../model-1.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "model.bin", "m\x00.safetensors", 7,
            None, "..\\x.safetensors", "x" * 300 + ".safetensors", "model-1.safetensors\n", ["model-1.safetensors"],
        )
    ),
    ("a shard is missing", indexed(GOOD | {EMBEDDING: "model-2.safetensors"}), "model-2.safetensors"),
    ("a tensor is in no shard", indexed(GOOD | {"model.extra": "model-1.safetensors"}), "model.extra"),
    ("shards repeat tensors", indexed(GOOD | {EMBEDDING: "model-2.safetensors"}, "model-2.safetensors"), "is also in"),
]  # fmt: skip
