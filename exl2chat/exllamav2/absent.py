"""Names that scripts import and that are not here: making one is an error that says what to do instead."""

from typing import ClassVar

from exl2chat.errors import UsageError


class Absent:
    """What the reference has beside text generation on one device."""

    remedy: ClassVar[str]

    def __init__(self, *args: object, **kwargs: object) -> None:  # noqa: ARG002
        """UsageError."""
        raise UsageError(f"{type(self).__name__} is not supported", self.remedy)


class ExLlamaV2Cache_TP(Absent):
    """The cache of a model that is split over devices."""

    remedy = "load the model with load_autosplit, on one device, and make an ExLlamaV2Cache"


class ExLlamaV2VisionTower(Absent):
    """The part of a model that reads images."""

    remedy = "use text models"


class ExLlamaV2WebSocketServer(Absent):
    """A server over web sockets."""

    remedy = "serve an ExLlamaV2DynamicGeneratorAsync from a web framework"
