"""`ExLlamaV2Config`: where a model is and how it is to run."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from exl2chat.errors import UsageError
from exl2chat.exllamav2.unsupported import refuse_set, unsupported
from exl2chat.model.checkpoint import Checkpoint, open_checkpoint
from exl2chat.model.config import ModelConfig, read_config
from exl2chat.model.folder import open_folder


def read_only(name: str) -> property:
    """What config.json says, as `ModelConfig` calls it. UsageError before `prepare`."""
    return property(lambda config: getattr(config.prepared(), name))


@dataclass(slots=True)
class ExLlamaV2Config:
    """Given a folder, it is read at once; otherwise set `model_dir` and call `prepare`.

    Fields that choose among the reference's kernels or bound its buffers (no_*, max_attention_size, max_output_len,
    max_batch_size, max_dq_size) are accepted and change nothing: results here do not depend on them. `device` and
    `dtype` are additions.
    """

    model_dir: str | Path | None = None
    max_batch_size: int = 1
    max_input_len: int = 2048
    max_attention_size: int = 2048**2
    max_output_len: int | None = None
    max_seq_len: int = 2048
    scale_pos_emb: float | None = 1.0
    scale_alpha_value: float | None = 1.0
    no_flash_attn: bool = False
    no_xformers: bool = False
    no_sdpa: bool = False
    no_graphs: bool = False
    load_in_q4: bool = False
    max_dq_size: int = 512 * 1024**2
    fasttensors: bool = False
    device: str = "auto"
    dtype: str = "auto"
    _read: ModelConfig | None = field(default=None, init=False)

    hidden_size = read_only("hidden_size")
    intermediate_size = read_only("intermediate_size")
    num_hidden_layers = read_only("num_layers")
    num_attention_heads = read_only("num_heads")
    num_key_value_heads = read_only("num_kv_heads")
    head_dim = read_only("head_dim")
    vocab_size = read_only("vocab_size")  # rows of the embedding
    bos_token_id = read_only("bos_id")
    eos_token_id = read_only("first_eos_id")  # the first of several, as in the reference

    def __post_init__(self) -> None:
        if self.model_dir is not None:
            self.prepare()

    def prepare(self, no_tensors: bool = False) -> None:
        """Read config.json and, unless `no_tensors`, check every tensor the model needs. Sets `max_seq_len`."""
        if self.model_dir is None:
            raise UsageError("ExLlamaV2Config: model_dir is not set", "set it before prepare()")
        folder = Path(self.model_dir)
        self._read = read_config(open_folder(folder)) if no_tensors else open_checkpoint(folder).config
        self.max_seq_len = self._read.context

    def arch_compat_overrides(self, quiet: bool = False, warn_only: bool = False) -> None:
        """Nothing to override: every architecture that loads runs on every backend here."""

    def set_low_mem(self) -> None:
        """Smaller prefill chunks."""
        self.max_input_len = 1024

    def prepared(self) -> ModelConfig:
        """What was read; UsageError before `prepare`."""
        if self._read is None:
            raise UsageError("ExLlamaV2Config: the model was not read", "call prepare() first")
        return self._read

    def checkpoint(self) -> Checkpoint:
        """The model on disk with the RoPE scaling of this config. UsageError for what is not supported."""
        refuse_set("ExLlamaV2Config", load_in_q4=self.load_in_q4)
        self.prepared()
        checkpoint = open_checkpoint(Path(self.model_dir or ""))
        return replace(checkpoint, config=self._scaled(checkpoint.config))

    def _scaled(self, config: ModelConfig) -> ModelConfig:
        linear, alpha = self.scale_pos_emb or 1.0, self.scale_alpha_value or 1.0
        if linear == alpha == 1.0:
            return config
        if config.rope.kind != "default" or 1.0 not in (linear, alpha):
            raise unsupported(
                f"ExLlamaV2Config: scale_pos_emb or scale_alpha_value over {config.rope.kind} RoPE scaling"
            )
        rope = replace(config.rope, kind="ntk" if linear == 1.0 else "linear", factor=linear * alpha)
        return replace(config, rope=rope)
