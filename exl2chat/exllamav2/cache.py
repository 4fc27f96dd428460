"""`ExLlamaV2Cache`: keys and values of one sequence."""

from functools import cached_property

from exl2chat.engine.cache import KVCache
from exl2chat.errors import UsageError
from exl2chat.exllamav2.model import ExLlamaV2
from exl2chat.exllamav2.unsupported import refuse_set, unsupported


class ExLlamaV2Cache:
    """Room for `max_seq_len` tokens (-1: the config's). A `lazy` one takes memory at load_autosplit or first use."""

    batch_size = 1

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
        if batch_size != 1:
            raise unsupported(f"ExLlamaV2Cache: batch_size {batch_size}")
        refuse_set("ExLlamaV2Cache", copy_from=copy_from, num_key_value_heads=num_key_value_heads)
        if fixed_device is not None:
            raise unsupported("ExLlamaV2Cache: fixed_device")
        self.max_seq_len = model.config.max_seq_len if max_seq_len == -1 else max_seq_len
        if self.max_seq_len < 1:
            raise UsageError(
                f"ExLlamaV2Cache: max_seq_len {max_seq_len}", "it is at least 1, or -1 for the model's own"
            )
        self._model = model
        if not lazy:
            self.reset()

    @cached_property
    def kv(self) -> KVCache:
        """The cache of the engine. ModelError when the model is not loaded."""
        return self._model.transformer.new_cache(self.max_seq_len)

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
        """Bytes, one number per device."""
        return [self.kv.nbytes]
