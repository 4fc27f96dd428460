"""Scripts that say `import exllamav2`, unchanged."""

import importlib
import pkgutil
import sys

from exl2chat.errors import UsageError

OURS, THEIRS = "exl2chat.exllamav2", "exllamav2"


def install() -> None:
    """From here on `import exllamav2`, and of whatever in it that is here too, gives this package.

    UsageError where exllamav2 itself is imported already: two of them would be mixed up.
    """
    ours = importlib.import_module(OURS)
    if sys.modules.get(THEIRS, ours) is not ours:
        raise UsageError("exllamav2 itself is imported already", "call install() before anything imports it")
    sys.modules[THEIRS] = ours
    for module in pkgutil.walk_packages(ours.__path__, OURS + "."):
        sys.modules[THEIRS + module.name.removeprefix(OURS)] = importlib.import_module(module.name)
