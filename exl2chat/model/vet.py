"""Unseen tokenizers and templates are tried once in a process that may die.

A tokenizer.json or a chat template can ask a library for more memory than there is, which aborts the process, or keep
a regular expression busy for hours; neither can be caught from Python. So files with an unseen hash are first opened
and used in a child with limited address space and processor time. The hashes of those that passed are remembered.
"""

import hashlib
import os
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from exl2chat.errors import ChatError, ModelError
from exl2chat.model.folder import ModelFolder, open_folder
from exl2chat.model.template import open_template
from exl2chat.model.tokenizer import open_tokenizer
from exl2chat.paths import Paths, open_private, private_folder

FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
RULES = b"1"  # counts up when this module tries more: what passed before is tried again
MEMORY = 2 << 30
SECONDS = 3
BYTES_PER_SECOND = 4 << 20  # large vocabularies need longer: 256,000 tokens (16 MB) took 1.6 s here
TEXTS = ("Hello, world! 0123456789", "naïve 日本語 العربية 😀\n\n\tx", "a" * 2000 + " " * 2000 + "<|/[{!?" * 300)
CHATS = (
    (("user", TEXTS[0]),),
    (("system", TEXTS[1]), ("user", TEXTS[2])),
    (("user", TEXTS[1]), ("assistant", TEXTS[2]), ("user", TEXTS[0])),
    (*((role, TEXTS[0]) for _ in range(10) for role in ("user", "assistant")), ("user", TEXTS[2])),
)


def vet(folder: ModelFolder, paths: Paths) -> None:
    """Try the tokenizer and the template of `folder` in a limited child, unless these very files passed before.

    ModelError if they are malformed, or if the child ran out of memory or time. Costs the start of one Python process
    the first time, and hashing the files afterwards.
    """
    try:
        digest = _digest(folder)
    except OSError as fault:
        raise ModelError(f"{fault.filename}: {fault.strerror}", "check the file and its permissions") from None
    passed = paths.cache / "vetted"
    if digest in _digests_in(passed):
        return
    child = subprocess.run(  # -P: what lies in the current folder, which may be the model's, is not imported
        [sys.executable, "-P", "-m", "exl2chat.model.vet", str(folder.path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if child.returncode == ModelError.status:
        raise ModelError(child.stdout.decode("utf-8", "replace").strip())
    if child.returncode != 0:
        message = f"{folder.path}: the tokenizer or the chat template was refused: it took too much memory or time"
        raise ModelError(message, "use another version of the model")
    with suppress(OSError, ChatError):  # where nothing can be written, files are tried again at each load
        private_folder(paths.cache)
        with os.fdopen(open_private(passed, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "w") as file:
            file.write(digest + "\n")


def _digest(folder: ModelFolder) -> str:
    total = hashlib.sha256(RULES)
    for name in FILES:
        if name in folder.files:
            total.update(f"{name} {folder.files[name].stat().st_size}\n".encode())
            with folder.files[name].open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _digests_in(passed: Path) -> list[str]:
    try:
        return passed.read_text("ascii", errors="replace").split()
    except OSError:  # there is none yet, or it is not ours to read
        return []


def try_out(folder: ModelFolder) -> None:
    """Open tokenizer and template, and put every text and chat through them. ModelError if they are malformed."""
    tokenizer = open_tokenizer(folder)
    for text in TEXTS:
        tokenizer.decode(tokenizer.encode(text))
    template = open_template(folder, tokenizer)
    for chat in CHATS:
        try:
            tokenizer.encode_chat(template.render(chat))
        except ModelError:
            continue  # a template may refuse a conversation; that it ends is what is tried here


def _limit(folder: ModelFolder) -> None:
    size = sum(path.stat().st_size for name, path in folder.files.items() if name in FILES)
    seconds = SECONDS + size // BYTES_PER_SECOND
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> int:
    """The child. Status 0 if the folder passed; 3, and a line on standard output, if it is malformed."""
    try:
        folder = open_folder(Path(sys.argv[1]))
        _limit(folder)
        try_out(folder)
    except ChatError as fault:
        print(fault)
        return fault.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
