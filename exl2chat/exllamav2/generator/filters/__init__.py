"""The filters of the reference, and the base of those that users write."""

from exl2chat.exllamav2.generator.filters.base import ExLlamaV2Filter, constraint_of
from exl2chat.exllamav2.generator.filters.prefix import ExLlamaV2PrefixFilter
from exl2chat.exllamav2.generator.filters.select import ExLlamaV2SelectFilter

__all__ = ["ExLlamaV2Filter", "ExLlamaV2PrefixFilter", "ExLlamaV2SelectFilter", "constraint_of"]
