"""A model folder, opened with suspicion: what may be read from it, and nothing else.

Only files of the kinds in `READABLE` are ever opened. Pickled weights are refused (unpickling runs code: CVE-2025-32434
even with weights_only), Python files and archives are not looked at. Every file resolves inside the folder, or, in the
hub's cache where a snapshot is made of links, inside the blobs of the same repository.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

from exl2chat.errors import ModelError
from exl2chat.model.strict_json import parse_object

READABLE = frozenset({".safetensors", ".json", ".jinja", ".model"})
PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
MAX_JSON = 16 << 20
MAX_TOKENIZER_JSON = 64 << 20


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """`files` maps each readable name directly in the folder to its path, which was checked to lead nowhere else."""

    path: Path
    files: Mapping[str, Path]

    @property
    def name(self) -> str:
        """What to call the model: the folder's name, or org/name for a snapshot in the hub's cache."""
        repository = self.path.parent.parent.name
        if self.path.parent.name == "snapshots" and repository.startswith("models--"):
            return repository.removeprefix("models--").replace("--", "/")
        return self.path.name

    def where(self, name: str) -> str:
        """How messages name a file of this folder."""
        return str(self.path / name)

    @overload
    def read_json(self, name: str, required: Literal[True]) -> dict[str, Any]: ...

    @overload
    def read_json(self, name: str) -> dict[str, Any] | None: ...

    def read_json(self, name: str, required: bool = False) -> dict[str, Any] | None:
        """The JSON object in `name`, parsed strictly; None where there is no such file, unless it is required."""
        if required and name not in self.files:
            raise ModelError(f"{self.path}: there is no {name}", "give the folder of a complete model")
        limit = MAX_TOKENIZER_JSON if name == "tokenizer.json" else MAX_JSON
        data = self._read(name, limit)
        return None if data is None else parse_object(data, self.where(name))

    def read_text(self, name: str, limit: int) -> str | None:
        """The UTF-8 text in `name`, at most `limit` bytes; None where there is no such file."""
        data = self._read(name, limit)
        try:
            return None if data is None else data.decode("utf-8")
        except UnicodeDecodeError as fault:
            message = f"{self.where(name)}: is not UTF-8 at byte {fault.start}"
            raise ModelError(message, "the file is damaged; download the model again") from None

    def _read(self, name: str, limit: int) -> bytes | None:
        if name not in self.files:
            return None
        try:
            with self.files[name].open("rb") as file:
                data = file.read(limit + 1)
        except OSError as fault:
            raise ModelError(f"{self.where(name)}: {fault.strerror}", "check the file and its permissions") from None
        if len(data) > limit:
            raise ModelError(f"{self.where(name)}: is larger than {limit >> 10} KiB", "no real model needs that much")
        return data


def open_folder(path: Path) -> ModelFolder:
    """The readable files of `path`. ModelError if it is no folder, holds only pickles, or a link leads out of it."""
    try:
        root = path.resolve(strict=True)
        entries = sorted(root.iterdir())
    except (OSError, RuntimeError) as fault:  # RuntimeError: a loop of links
        reason = getattr(fault, "strerror", None) or "a loop of links"
        raise ModelError(f"{path}: {reason}", "give the folder that holds the model's config.json") from None
    suffixes = {entry.suffix.lower() for entry in entries}
    if ".safetensors" not in suffixes and suffixes & PICKLES:
        raise ModelError(
            f"{path}: the weights are pickled ({', '.join(sorted(suffixes & PICKLES))}), which can run code when read",
            "use a safetensors version of the model",
        )
    return ModelFolder(root, {entry.name: _contained(entry, root) for entry in entries if entry.suffix in READABLE})


def _contained(entry: Path, root: Path) -> Path:
    """`entry`, if the file behind it lies in `root` or in the blobs of the hub cache it belongs to."""
    try:
        real = entry.resolve(strict=True)
    except (OSError, RuntimeError):
        raise ModelError(f"{entry}: is a link that leads nowhere", "download the model again") from None
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(place) for place in allowed):
        remedy = "name the folder that it leads to, or put the file itself there"
        raise ModelError(f"{entry}: is a link that leads out of the model's folder", remedy)
    if not real.is_file():
        raise ModelError(f"{entry}: is not a regular file", "remove it or download the model again")
    return entry
