"""The public names of exllamav2 over this package's classes, for scripts written against it.

Change the import and nothing else, or call `install()` first and change nothing. A parameter that is not supported yet
is an error as soon as it is set to anything that would matter; none is ignored. Beyond the reference,
`ExLlamaV2Config.device` and `.dtype` take the values of `--device` and `--dtype`.
"""

from exl2chat.exllamav2 import model_init
from exl2chat.exllamav2.absent import ExLlamaV2Cache_TP, ExLlamaV2VisionTower
from exl2chat.exllamav2.cache import (
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2CacheBase,
)
from exl2chat.exllamav2.config import ExLlamaV2Config
from exl2chat.exllamav2.install import install
from exl2chat.exllamav2.lora import ExLlamaV2Lora
from exl2chat.exllamav2.model import ExLlamaV2
from exl2chat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exl2chat.exllamav2.util import Timer

__all__ = [
    "ExLlamaV2",
    "ExLlamaV2Cache",
    "ExLlamaV2CacheBase",
    "ExLlamaV2Cache_8bit",
    "ExLlamaV2Cache_Q4",
    "ExLlamaV2Cache_Q6",
    "ExLlamaV2Cache_Q8",
    "ExLlamaV2Cache_TP",
    "ExLlamaV2Config",
    "ExLlamaV2Lora",
    "ExLlamaV2Tokenizer",
    "ExLlamaV2VisionTower",
    "Timer",
    "install",
    "model_init",
]
