"""`ExLlamaV2Cache` and its relatives: keys and values, as attention computes or in fewer bits."""

from dataclasses import replace
from functools import cached_property

from exl2chat.engine.cache import BITS, PAGE, KVCache, cache_bytes
from exl2chat.errors import ModelError, UsageError, is_out_of_memory
from exl2chat.exllamav2.model import ExLlamaV2
from exl2chat.exllamav2.unsupported import refuse_set, unsupported


class ExLlamaV2Cache:
    """Room for `batch_size` sequences of `max_seq_len` tokens (-1: the config's). A `lazy` one takes memory at
    load_autosplit or first use."""

    bits = BITS["fp16"]

    def __init__(
        self,
        model: ExLlamaV2,
        batch_size: int = 1,
        max_seq_len: int = -1,
        copy_from: object = None,
        lazy: bool = False,
        num_key_value_heads: int | None = None,
        fixed_device: int | None = None,
    ) -> None:
        refuse_set("ExLlamaV2Cache", copy_from=copy_from, num_key_value_heads=num_key_value_heads)
        if fixed_device is not None:
            raise unsupported("ExLlamaV2Cache: fixed_device")
        self.batch_size = batch_size
        self.max_seq_len = model.config.max_seq_len if max_seq_len == -1 else max_seq_len
        if self.max_seq_len < 1 or batch_size < 1:
            raise UsageError(
                f"ExLlamaV2Cache: max_seq_len {max_seq_len}, batch_size {batch_size}",
                "they are at least 1; max_seq_len may be -1 for the model's own",
            )
        self._model = model
        if not lazy:
            self.reset()

    @property
    def capacity(self) -> int:
        """Tokens of all sequences together, each of which has pages of its own."""
        pages = -(-self.max_seq_len // PAGE)
        return self.max_seq_len if self.batch_size == 1 else self.batch_size * pages * PAGE

    @cached_property
    def kv(self) -> KVCache:
        """The cache of the engine: the memory of all sequences, in pages. ModelError when the model is not loaded, or
        the memory not there."""
        model = replace(self._model.transformer, cache_bits=self.bits)
        try:
            return model.new_cache(self.capacity)
        except (MemoryError, RuntimeError) as fault:
            if not is_out_of_memory(fault):
                raise
            size = cache_bytes(model.config, self.capacity, model.device, model.dtype, self.bits) / (1 << 30)
            what = f"{type(self).__name__}: {self.capacity} tokens take {size:,.1f} GiB, which do not fit the memory"
            raise ModelError(what, "lower max_seq_len or batch_size, or take a cache of fewer bits") from None

    @property
    def current_seq_len(self) -> int:
        """How many tokens are in the cache. May be lowered, which forgets those at the end."""
        return self.kv.length

    @current_seq_len.setter
    def current_seq_len(self, length: int) -> None:
        if not 0 <= length <= self.kv.length:
            raise UsageError(f"current_seq_len {length}: the cache holds {self.kv.length}", "it can only shrink")
        self.kv.truncate(length)

    def reset(self) -> None:
        """Forget every token."""
        self.kv.truncate(0)

    def footprint(self) -> list[int]:
        """Bytes of keys and values, one number per device."""
        return [self.kv.storage.nbytes]


ExLlamaV2CacheBase = ExLlamaV2Cache  # what scripts call any of them


class ExLlamaV2Cache_Q8(ExLlamaV2Cache):
    """Keys and values in 8 bits."""

    bits = BITS["q8"]


class ExLlamaV2Cache_Q6(ExLlamaV2Cache):
    """Keys and values in 6 bits."""

    bits = BITS["q6"]


class ExLlamaV2Cache_Q4(ExLlamaV2Cache):
    """Keys and values in 4 bits."""

    bits = BITS["q4"]


class ExLlamaV2Cache_8bit(ExLlamaV2Cache_Q8):
    """What the reference keeps in FP8 is kept as Q8 here: as large, and closer."""
