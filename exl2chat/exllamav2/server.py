"""The place of the reference's server."""

from exl2chat.exllamav2.absent import ExLlamaV2WebSocketServer

__all__ = ["ExLlamaV2WebSocketServer"]
