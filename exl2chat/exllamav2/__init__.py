"""The public names of exllamav2 over this package's classes, for scripts written against it.

Change the import and nothing else. A parameter that is not supported yet is an error as soon as it is set to anything
that would matter; none is ignored. Beyond the reference, `ExLlamaV2Config.device` and `.dtype` take the values of
`--device` and `--dtype`.
"""

from exl2chat.exllamav2.cache import ExLlamaV2Cache
from exl2chat.exllamav2.config import ExLlamaV2Config
from exl2chat.exllamav2.lora import ExLlamaV2Lora
from exl2chat.exllamav2.model import ExLlamaV2
from exl2chat.exllamav2.tokenizer import ExLlamaV2Tokenizer

__all__ = ["ExLlamaV2", "ExLlamaV2Cache", "ExLlamaV2Config", "ExLlamaV2Lora", "ExLlamaV2Tokenizer"]
