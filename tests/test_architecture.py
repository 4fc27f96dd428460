"""The rules of the house that a machine can check: who imports whom, what stays out of which process, and sizes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from exl2chat import errors
from exl2chat.chat.commands import COMMANDS
from exl2chat.settings import OPTIONS
from exl2chat.ui.keys import keys_page

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "exl2chat"

FOUNDATION = ("exl2chat", "errors", "settings", "paths", "progress", "safetext", "expressions")

# A module is governed by the longest key that it begins with; it may import itself, the foundation and what is listed.
ALLOWED = {
    **dict.fromkeys(FOUNDATION, ()),
    "model": (),
    "kernels": (),
    "ops": ("kernels",),
    "engine": ("ops", "model"),
    "exllamav2": ("engine", "model"),
    "link": ("link",),
    "link.service": ("link", "model"),
    "link.host": ("link", "engine", "model"),
    "chat": ("link.protocol",),
    "chat.reply": ("chat", "link.protocol", "model.lora"),
    "ui": ("chat", "link.protocol"),
    "cli": (),
    "__main__": ("cli",),
    "start": ("chat", "link", "ui", "run", "plain", "model"),
    "run": ("chat", "link"),
    "plain": ("chat",),
    "pull": ("model",),
    "bench": ("engine", "ops", "model", "link.threads", "gpu_report"),
    "gpu_report": ("engine", "ops"),
    "doctor": ("engine", "ops", "kernels", "model", "link.threads", "chat.session"),
    "sessions": ("chat",),
    "locations": (),
}  # fmt: skip

# Where a heavy or a terminal library may be imported.
CONFINED = {
    "torch": ("engine", "ops", "kernels", "exllamav2", "bench", "gpu_report", "doctor"),
    "cupy": ("kernels", "ops", "gpu_report", "doctor"),
    "textual": ("ui",),
    "tokenizers": ("model",),
    "sentencepiece": ("model",),
    "minijinja": ("model",),
    "huggingface_hub": ("model",),
}

READ_ENVIRONMENT = ("settings", "paths")

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60


def module_of(path):
    """`exl2chat/chat/tree.py` is "chat.tree"; the package itself is "exl2chat"."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "exl2chat"


MODULES = {module_of(path): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {module: ast.parse(source) for module, source in MODULES.items()}


def within(module, *prefixes):
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def imports(tree):
    """Every module a file imports, wherever in the file; those of the package without its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            deeper = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names = [full if full.removeprefix("exl2chat.") in MODULES else node.module for full in deeper.values()]
        else:
            continue
        yield from (name.removeprefix("exl2chat.") for name in names)


def every(kind):
    """(module, node) for each node of one kind in the package."""
    return [(module, node) for module, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, kind)]


def test_imports_follow_the_directions_of_the_architecture():
    wrong = []
    for module, tree in TREES.items():
        rows = [key for key in ALLOWED if within(module, key)]
        assert rows, f"{module} has no row in ALLOWED"
        row = max(rows, key=len)
        ours = [name for name in imports(tree) if name in MODULES]
        wrong += [f"{module} -> {name}" for name in ours if not within(name, row, *ALLOWED[row], *FOUNDATION)]
    assert not wrong


def test_imports_are_absolute():
    assert not [module for module, node in every(ast.ImportFrom) if node.level]


def test_heavy_libraries_stay_where_they_belong():
    wrong = []
    for module, tree in TREES.items():
        for library, places in CONFINED.items():
            if not within(module, *places) and any(within(name, library) for name in imports(tree)):
                wrong.append(f"{module} -> {library}")
    assert not wrong


def test_files_and_functions_fit_on_screens():
    assert not [module for module, source in MODULES.items() if source.count("\n") > MAX_FILE_LINES]
    functions = every(ast.FunctionDef | ast.AsyncFunctionDef)
    assert not [f"{m}.{f.name}" for m, f in functions if f.end_lineno - f.lineno >= MAX_FUNCTION_LINES]


def test_every_module_says_what_it_is_for():
    assert not [module for module, tree in TREES.items() if not ast.get_docstring(tree)]


def test_the_environment_is_read_in_one_place():
    readers = {module for module, node in every(ast.Attribute) if ast.unparse(node) in ("os.environ", "os.getenv")}
    assert readers <= set(READ_ENVIRONMENT)


def test_modules_hold_constants_only():
    assert not every(ast.Global)
    mutable = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    variables = [
        f"{module}: {ast.unparse(node.targets[0])}"
        for module, tree in TREES.items()
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, mutable)
        if not ast.unparse(node.targets[0]).strip("_").replace("_", "").isupper()
    ]
    assert not [name for name in variables if "__all__" not in name]


@pytest.mark.parametrize(
    "modules",
    ["exl2chat", "exl2chat.cli, exl2chat.start", "exl2chat.run", "exl2chat.ui.app", "exl2chat.link.local",
     "exl2chat.link.worker", "exl2chat.model.checkpoint, exl2chat.model.hub"],
)  # fmt: skip
def test_torch_is_imported_by_the_engine_only(modules):
    code = f"import sys, {modules}; sys.exit(bool({{'torch', 'cupy', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_worker_imports_no_screen():
    code = "import sys, exl2chat.link.host; sys.exit(bool({'textual', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_every_option_has_help():
    assert all(option.help for option in OPTIONS)


def test_the_readme_lists_every_option_as_the_table_has_it():
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    rows = [f"| `{option.flag}` | `{option.env}` | {option.help} |" for option in OPTIONS]
    assert not [row for row in rows if row not in readme]


def test_the_readme_lists_every_command_of_the_chat():
    readme = (REPOSITORY / "README.md").read_text("utf-8").replace("\\|", "|")
    rows = [f"| `{f'/{command.name} {command.syntax}'.strip()}` | {command.summary} |" for command in COMMANDS]
    assert not [row for row in rows if row not in readme]


def test_the_readme_lists_every_key_of_the_chat():
    assert keys_page() in (REPOSITORY / "README.md").read_text("utf-8")


def test_the_readme_lists_every_exit_status():
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ChatError)]
    for status in {0, 130, 141, *(kind.status for kind in kinds)}:
        assert f"| {status} |" in readme
