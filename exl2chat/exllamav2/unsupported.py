"""Parameters of the reference that do not work here yet."""

import torch

from exl2chat.errors import UsageError


def refuse_set(where: str, **parameters: object) -> None:
    """UsageError naming the first of `parameters` that is set: anything but None, False, 0 and what is empty."""
    for name, value in parameters.items():
        if isinstance(value, torch.Tensor) or value:
            raise unsupported(f"{where}: {name}")


def unsupported(what: str) -> UsageError:
    """The error for something the reference has and this package has not."""
    return UsageError(f"{what} is not supported yet", "leave it at its default")
