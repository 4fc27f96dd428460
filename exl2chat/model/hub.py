"""From what a user calls a model to a folder: a path, a hub reference or the name of the default model."""

import re
from pathlib import Path

from exl2chat.errors import ModelError
from exl2chat.model import smollm2
from exl2chat.model.bitrate import choose_branch, parse_bitrate
from exl2chat.model.hub_client import Hub
from exl2chat.paths import Paths
from exl2chat.progress import Progress

HUB = Hub()
_REFERENCE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+)|:(?P<bitrate>[\w.-]+))?")


def resolve(reference: str, paths: Paths, progress: Progress, hub: Hub = HUB) -> Path:
    """The complete model folder that `reference` means, downloaded or converted first where needed.

    A folder's path is used as it is. `org/name`, `org/name@revision` and `org/name:4.0bpw` are hub repositories; one
    that is in the cache is used without asking the network. `smollm2` is the default model. ModelError otherwise.
    """
    if reference == smollm2.NAME:
        return smollm2.prepare(paths, progress, smollm2.default_fetchers(hub))
    folder = _local_folder(reference)
    if folder is not None:
        return folder
    parts = _REFERENCE.fullmatch(reference)
    if parts is None:
        raise ModelError(
            f"'{reference}' is neither a folder nor a model on the hub", "write a path, org/name or smollm2"
        )
    repo, revision, bitrate = parts["repo"], parts["revision"] or "main", parts["bitrate"]
    if bitrate:
        revision = _branch(repo, bitrate, hub)
    return hub.cached(repo, revision) or hub.download(repo, revision, progress)


def local_models(paths: Paths, hub: Hub = HUB) -> list[tuple[str, Path]]:
    """Name, as `resolve` takes it, and folder of every model that needs no download."""
    default = paths.models / smollm2.FOLDER
    return [(smollm2.NAME, default)] * default.is_dir() + list(hub.cached_models())


def _local_folder(reference: str) -> Path | None:
    """`reference` as a folder that exists; ModelError if it can only be a path, and there is no folder."""
    try:
        path = Path(reference).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except RuntimeError:
        raise ModelError(f"{reference}: there is no such user", "give the path of a model folder") from None
    except OSError as fault:
        raise ModelError(f"{reference}: {fault.strerror}", "check the path") from None
    if reference and is_folder:
        return path
    if is_file:
        raise ModelError(f"{path}: is a file", "give the folder it is in")
    if reference.startswith(("/", "./", "../", "~")):
        raise ModelError(f"{path}: there is no such folder", "check the path")
    return None


def _branch(repo: str, bitrate: str, hub: Hub) -> str:
    """The branch `bitrate` means; the network is asked unless the cache has one of just these bits."""
    wanted = parse_bitrate(bitrate)
    equal = [name for name in hub.cached_branches(repo) if wanted and parse_bitrate(name) == wanted]
    return equal[0] if len(equal) == 1 else choose_branch(repo, bitrate, hub.branches(repo))
