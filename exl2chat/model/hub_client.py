"""The Hugging Face hub and its cache: whole model repositories, as far as a chat needs them."""

import errno
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from exl2chat.errors import ModelError
from exl2chat.model.folder import open_folder
from exl2chat.progress import Progress
from exl2chat.settings import complete_environment

WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
# Sub-folders hold other formats of the same model; a consolidated file is all its weights a second time.
UNWANTED = ("*/*", "consolidated*")
PROBE_SECONDS = 3.0
_SHARD = re.compile(r"(.*)-\d+-of-(\d+)\.safetensors")


def _library() -> ModuleType:
    """huggingface_hub, imported when first needed: without telemetry, and without warnings, which servers write."""
    complete_environment({"HF_HUB_DISABLE_TELEMETRY": "1"})
    import huggingface_hub

    huggingface_hub.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return huggingface_hub


@dataclass(frozen=True, slots=True)
class Hub:
    """`endpoint` and `cache` None: where HF_ENDPOINT and HF_HUB_CACHE (or HF_HOME) say."""

    endpoint: str | None = None
    cache: Path | None = None

    def cached(self, repo: str, revision: str) -> Path | None:
        """The snapshot of `revision` if it is here and complete. No network."""
        from huggingface_hub.errors import LocalEntryNotFoundError

        with _explained(repo):
            try:
                folder = Path(self._snapshot(repo, revision, local_files_only=True))
            except LocalEntryNotFoundError:
                return None
        return folder if is_complete(folder) else None

    def download(self, repo: str, revision: str, progress: Progress) -> Path:
        """The snapshot of `revision`, fetched or brought up to date; an interrupted download goes on where it was.

        ModelError when it cannot be had, or has no safetensors weights.
        """
        from huggingface_hub.errors import RevisionNotFoundError

        progress(f"looking up {repo} on the hub")
        try:
            with _explained(repo):
                folder = Path(self._snapshot(repo, revision, tqdm_class=_bar_class(f"downloading {repo}", progress)))
        except RevisionNotFoundError:
            raise ModelError(
                f"{repo} has no branch, tag or commit {revision}", f"it has {', '.join(self.branches(repo))}"
            ) from None
        if not is_complete(folder):
            others = [name for name in self.branches(repo) if name != revision]
            remedy = f"other branches: {', '.join(others)}" if others else "name a repository with EXL2 or GPTQ weights"
            raise ModelError(f"{repo} has no complete safetensors model in its branch {revision}", remedy)
        return folder

    def branches(self, repo: str) -> tuple[str, ...]:
        """The names of all branches, from the hub."""
        with _explained(repo):
            return tuple(branch.name for branch in self._api().list_repo_refs(repo).branches)

    def cached_branches(self, repo: str) -> tuple[str, ...]:
        """The branches and tags of which something is in the cache. No network."""
        return tuple(ref for found in self._cached_repos() if found.repo_id == repo for ref in found.refs)

    def cached_models(self) -> Iterator[tuple[str, Path]]:
        """References and folders of the complete EXL2 and GPTQ models in the cache. No network."""
        for repo in self._cached_repos():
            for ref, revision in repo.refs.items():
                if is_complete(revision.snapshot_path) and _is_quantised(revision.snapshot_path):
                    yield (repo.repo_id if ref == "main" else f"{repo.repo_id}@{ref}"), revision.snapshot_path

    def probe(self, repo: str) -> None:
        """ModelError, in a few seconds, unless the hub can be reached and has `repo`."""
        with _explained(repo):
            self._api().model_info(repo, timeout=PROBE_SECONDS)

    def _api(self) -> Any:
        return _library().HfApi(endpoint=self.endpoint)

    def _snapshot(self, repo: str, revision: str, **options: Any) -> str:
        folder: str = _library().snapshot_download(
            repo,
            revision=revision,
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
            endpoint=self.endpoint,
            cache_dir=self.cache,
            **options,
        )
        return folder

    def _cached_repos(self) -> list[Any]:
        from huggingface_hub.errors import CacheNotFound

        try:
            return sorted(_library().scan_cache_dir(self.cache).repos, key=lambda repo: repo.repo_id)
        except CacheNotFound:
            return []


def is_complete(folder: Path) -> bool:
    """Whether config.json and every shard of the weights are there, as far as file names tell."""
    names = {file.name for file in folder.iterdir() if file.exists()}
    shards = [name for name in names if name.endswith(".safetensors")]
    parts = Counter(found.groups() for name in shards if (found := _SHARD.fullmatch(name)))
    return "config.json" in names and bool(shards) and all(have == int(count) for (_, count), have in parts.items())


def _is_quantised(folder: Path) -> bool:
    try:
        config = open_folder(folder).read_json("config.json", required=True)
    except ModelError:
        return False
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") in ("exl2", "gptq")


def _bar_class(stage: str, progress: Progress) -> type:
    """A tqdm class that shows nothing and tells `progress`.

    The library opens several bars: bytes received, bytes written, files. Those of bytes are told, whichever is ahead.
    A disabled tqdm takes no lock: an enabled one whose display raises would keep it, and the download would hang.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0
        ahead = 0

        def __init__(self, *args: Any, unit: str = "it", **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            self.counts_bytes = unit == "B"

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.counts_bytes:
                Bar.ahead = max(Bar.ahead, int(self.n))
                progress(stage, Bar.ahead, max(int(self.total or 0), Bar.ahead), "B")

    return Bar


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into one ModelError; RevisionNotFoundError passes."""
    from httpx2 import HTTPError
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        yield
    except RevisionNotFoundError:
        raise
    except (HTTPError, OSError, ValueError) as fault:
        raise _explain(repo, fault) from None


def _explain(repo: str, fault: Exception) -> ModelError:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if isinstance(fault, LocalEntryNotFoundError) and isinstance(fault.__cause__, Exception):
        fault = fault.__cause__
    if isinstance(fault, HFValidationError):
        return ModelError(f"'{repo}' cannot be a repository's name", "write organisation/name")
    if isinstance(fault, GatedRepoError):
        return ModelError(f"{repo} is gated", "accept its terms on its page, then `hf auth login`")
    if isinstance(fault, RepositoryNotFoundError):
        return ModelError(
            f"the hub has no public repository {repo}", "check the name; for a private one `hf auth login`"
        )
    if isinstance(fault, HfHubHTTPError):
        status = fault.response.status_code
        remedy = "`hf auth login` first" if status in (401, 403) else "try again later"
        return ModelError(f"the hub answered {status} to the request for {repo}", remedy)
    if isinstance(fault, OfflineModeIsEnabled):
        return ModelError(f"{repo} is not in the cache and HF_HUB_OFFLINE is set", "unset it to download")
    if isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelError(f"the disk is full: {repo} does not fit", "make room, or set HF_HOME to another disk")
    if isinstance(fault, PermissionError):
        return ModelError(f"{fault.filename}: {fault.strerror}", "set HF_HOME to a folder you may write to")
    return ModelError(f"the hub cannot be reached for {repo}", "check the network, or give a model folder")
