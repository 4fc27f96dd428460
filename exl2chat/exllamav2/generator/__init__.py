"""The generators and the sampler under the reference's names."""

from exl2chat.exllamav2.generator.sampler import ExLlamaV2Sampler
from exl2chat.exllamav2.generator.streaming import ExLlamaV2StreamingGenerator

__all__ = ["ExLlamaV2Sampler", "ExLlamaV2StreamingGenerator"]
