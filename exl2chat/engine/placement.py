"""Where a model runs and in what arithmetic, and whether it fits there: decided before anything is loaded."""

from bisect import bisect_right
from dataclasses import dataclass, replace

import torch

from exl2chat.engine.cache import BITS, PAGE, cache_bytes
from exl2chat.engine.free_memory import free_memory
from exl2chat.engine.transformer import prefill_chunk
from exl2chat.errors import ModelError, UsageError
from exl2chat.model.checkpoint import Checkpoint
from exl2chat.model.config import ModelConfig
from exl2chat.model.quant import Linear
from exl2chat.ops.attention import PLAIN_BITS
from exl2chat.ops.cache_decode import decoding_bytes
from exl2chat.ops.cache_format import LEAST_BLOCK
from exl2chat.ops.cuda_prefill import EXPANDED_BYTES

DEFAULT_CONTEXT = 8192
LEAST_CONTEXT = 1024  # a shorter one is no chat: better to say that the model does not fit
GPU_RESERVE = 512 << 20


def choose_device(name: str) -> torch.device:
    """The device of `--device`: "auto" is the GPU where there is one. ModelError for "cuda" without one."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        built = "torch sees no NVIDIA GPU" if torch.version.cuda else "this torch is built without CUDA"
        raise ModelError(f"--device cuda: {built}", "use --device cpu, or install a CUDA build of torch and its driver")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of `--dtype`. "auto" is float16 on a GPU and bfloat16 on the CPU.

    On the CPU bfloat16 names the fastest way: single tokens in float16 on weights that are exact, prompts in bfloat16
    (twice as fast, for 0.4 % of perplexity at most), 4-bit GPTQ from its codes. float16 reads prompts in float32.
    """
    auto = "bfloat16" if device.type == "cpu" else "float16"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[
        auto if name == "auto" else name
    ]


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that a model with a cache for `context` tokens takes; `free` is what there is, None where the system does
    not tell. `wanted` is the context it would have been given with more memory."""

    weights: int
    cache: int
    workspace: int
    free: int | None
    context: int
    wanted: int

    @property
    def fits(self) -> bool:
        return self.free is None or self.weights + self.cache + self.workspace <= self.free

    @property
    def note(self) -> str:
        """What a user should know of it; empty where all is as usual."""
        if self.context == self.wanted:
            return ""
        return f"the context is {self.context} tokens: with {self.wanted} the model does not fit the free memory"

    def __str__(self) -> str:
        total = self.weights + self.cache + self.workspace
        unit, size = ("GiB", 30) if total >> 30 else ("MiB", 20)

        def show(count: int) -> str:
            return f"{count / (1 << size):,.{1 if size == 30 else 0}f}"

        free = "" if self.free is None else f" of {show(self.free)}"
        parts = f"{show(self.weights)} weights, {show(self.cache)} cache, {show(self.workspace)} workspace"
        return f"{show(total)}{free} {unit} ({parts})"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that may be loaded: what messages call it, how many bytes its weights take once they are, and the bits of
    a value in its cache."""

    name: str
    config: ModelConfig
    weights: int
    cache_bits: int = PLAIN_BITS

    def cache_bytes(self, context: int, device: torch.device, dtype: torch.dtype) -> int:
        return cache_bytes(self.config, context, device, dtype, self.cache_bits)


def candidate(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, cache_bits: int = PLAIN_BITS
) -> Candidate:
    """A checkpoint as `plan_memory` sees it. ModelError where its keys and values cannot be kept in so few bits."""
    size = checkpoint.config.head_dim
    if cache_bits != PLAIN_BITS and size % LEAST_BLOCK:
        raise ModelError(
            f"{checkpoint.folder.path}: heads of {size} numbers cannot be kept in {cache_bits} bits", "use --cache fp16"
        )
    weights = weight_bytes(checkpoint, dtype, device.type == "cuda" and dtype == torch.float16)
    return Candidate(str(checkpoint.folder.path), checkpoint.config, weights, cache_bits)


def check_context(checkpoint: Checkpoint, asked: int | None) -> None:
    """UsageError where a longer context is asked for than the model was made for."""
    longest = checkpoint.config.context
    if asked is not None and asked > longest:
        raise UsageError(f"--ctx {asked}: {checkpoint.folder.path.name} was made for {longest} tokens", "ask for less")


def plan_memory(
    model: Candidate,
    device: torch.device,
    dtype: torch.dtype,
    asked: int | None,
    reusable: int = 0,
    usual: int = DEFAULT_CONTEXT,
) -> Budget:
    """The budget for a context of `asked` tokens; None: what the model was made for, at most `usual`, and less where
    that does not fit. `reusable` bytes are in use now and will be free by then.

    ModelError with the sum and the remedy where it does not fit.
    """
    wanted = min(model.config.context, usual) if asked is None else asked
    free = free_bytes(device)
    budget = Budget(
        weights=model.weights,
        cache=model.cache_bytes(wanted, device, dtype),
        workspace=workspace_bytes(model.config, device) + copy_bytes(model, device, wanted),
        free=None if free is None else free + reusable,
        context=wanted,
        wanted=wanted,
    )
    if budget.free is None or budget.fits:
        return budget
    room = budget.free - model.weights - workspace_bytes(model.config, device)

    def need(pages: int) -> int:
        return model.cache_bytes(pages * PAGE, device, dtype) + copy_bytes(model, device, pages * PAGE)

    fitting = min(wanted, PAGE * max(0, bisect_right(range(1 + -(-wanted // PAGE)), room, key=need) - 1))
    if asked is None and fitting >= LEAST_CONTEXT:
        workspace = workspace_bytes(model.config, device) + copy_bytes(model, device, fitting)
        return replace(budget, cache=model.cache_bytes(fitting, device, dtype), workspace=workspace, context=fitting)
    smaller = "choose fewer bits per weight or a smaller model"
    more = ", or more with --cache q4" if model.cache_bits > BITS["q4"] else ""
    raise ModelError(
        f"{model.name}: {_gib(budget.weights)} GiB of weights, {_gib(budget.cache)} GiB of cache for {wanted} tokens "
        f"and {_gib(budget.workspace)} GiB of workspace do not fit {_gib(budget.free)} GiB of free memory",
        f"--ctx {fitting} would fit{more}; or {smaller}" if fitting else smaller,
    )


def workspace_bytes(config: ModelConfig, device: torch.device) -> int:
    """Bytes that a step takes for the largest chunk of a prompt, beside weights and cache: activations at 4 bytes each,
    and on a GPU the decoded matrices of `ops.tiled`, compiled kernels, graphs and what cuBLAS reserves. What many jobs
    draw with (`paged_steps`) is part of that reserve: nobody knows here if there will be any."""
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    numbers = 4 * config.hidden_size + 2 * qkv + 3 * config.intermediate_size
    fixed = GPU_RESERVE if device.type == "cuda" else 0
    return 4 * prefill_chunk(device) * numbers + fixed


def copy_bytes(model: Candidate, device: torch.device, context: int) -> int:
    """Bytes of the largest copy of a layer's quantised cache that a step makes: on a GPU in float16 for a prompt
    (ops.cuda_prefill), elsewhere of some of its heads for every step (ops.cache_decode).

    In a long context the first is made in the middle of a prompt, not in the step at its end that a load tries.
    """
    if model.cache_bits == PLAIN_BITS:
        return 0
    if device.type != "cuda":
        return decoding_bytes(model.config.num_kv_heads, model.config.head_dim, context)
    return min(EXPANDED_BYTES, 4 * model.config.num_kv_heads * model.config.head_dim * context)


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype, stays_packed: bool = False) -> int:
    """Bytes of the weights once loaded, with a work copy in float32 of the largest matrix of a layer.

    Where quantised weights stay packed, in float16 on a CUDA device, their scales take a few hundredths more than on
    disk.
    """

    def size(linear: Linear) -> int:
        if stays_packed and linear.kind != "plain":
            return linear.weight_bytes * 21 // 20
        return linear.in_features * linear.out_features * dtype.itemsize

    layers = [linear for layer in checkpoint.layers for linear in layer.linears]
    work = 4 * max(linear.in_features * linear.out_features for linear in layers)
    return sum(map(size, [*layers, checkpoint.head])) + checkpoint.embedding.nbytes + work


def free_bytes(device: torch.device) -> int | None:
    """Memory that can be had on `device`; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_memory()


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}"
