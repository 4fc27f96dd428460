"""How near the products with packed weights come to the memory bandwidth: the matrices of an 8B model, random codes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from exl2chat.kernels import load
from exl2chat.ops.packed import Weight
from exl2chat.ops.recording import record
from exl2chat.ops.tiled import Tiled, TiledWeight, arrange, join
from exl2chat.ops.tiles import QUAD, STRIP, TILE, find_runs

# The matrices of Llama-3.1-8B, by the widths of the projections that share an input; 4.1 bits per weight, a head of 6.
BODY: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "qkv": (4096, (4096, 1024, 1024)), "o": (4096, (4096,)), "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}  # fmt: skip
HEAD = (4096, (128256,))
LAYERS = 32
BODY_BITS, HEAD_BITS = ((5, 0.1), (4, 0.9)), ((6, 1.0),)
READ_BYTES = 8 << 30
REPEATS = 15


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A median time in microseconds, and what it is measured against: the same bytes read at full bandwidth, or with
    many rows torch's product of the same shape in float16. one: the name of another row that it is compared with."""

    name: str
    rows: int
    microseconds: float
    ceiling_microseconds: float
    ceiling: str
    one: str = ""

    @property
    def ratio(self) -> float:
        return self.ceiling_microseconds / self.microseconds

    def as_object(self) -> dict[str, str | int | float]:
        """For JSON; `ratio` is the share of the ceiling that was reached."""
        return {
            "name": self.name,
            "rows": self.rows,
            "microseconds": round(self.microseconds, 2),
            "ceiling_microseconds": round(self.ceiling_microseconds, 2),
            "ceiling": self.ceiling,
            "ratio": round(self.ratio, 3),
        }


def measure_read(device: torch.device) -> float:
    """Bytes per second of a kernel that only reads: READ_BYTES, or a quarter of the free memory if that is less."""
    count = min(READ_BYTES, torch.cuda.mem_get_info(device)[0] // 4) // 16 * 16
    memory = torch.empty(count // 4, dtype=torch.int32, device=device)
    result = torch.zeros(1, dtype=torch.int32, device=device)
    kernel = load("read.cu", "read_all", device)
    blocks = 8 * torch.cuda.get_device_properties(device).multi_processor_count
    seconds = time_graph(lambda: kernel.launch((blocks, 1), 256, 0, memory, result, count // 16))
    return count / seconds


def measure_products(device: torch.device, bandwidth: float) -> list[KernelRow]:
    """Each matrix for 1, 5 and 16 rows, and all of a token's in a chain: what one decoding step multiplies."""
    weights = {name: [random_weight(*shape, BODY_BITS, device) for _ in range(LAYERS)] for name, shape in BODY.items()}
    weights["head"] = [random_weight(*HEAD, HEAD_BITS, device)]
    result = []
    for rows in (1, 5, 16):
        for name, group in weights.items():
            seconds = time_graph(_products(group, rows, device)) / len(group)
            result.append(_row(name, rows, seconds, group[0].nbytes / bandwidth))
        steps = {name: _products(group, rows, device) for name, group in weights.items()}
        total = sum(weight.nbytes for group in weights.values() for weight in group)
        seconds = time_graph(lambda steps=steps: [step() for step in steps.values()])  # type: ignore[misc]
        result.append(_row("all matrices of a token", rows, seconds, total / bandwidth))
    return result


def measure_crossover(device: torch.device) -> list[KernelRow]:
    """gate_up for more rows: decoded on the way to the tensor cores, and through float16 copies, against torch.mm."""
    weight = random_weight(*BODY["gate_up"], BODY_BITS, device)
    dense = torch.randn(BODY["gate_up"][0], weight.width, device=device).half()
    result = []
    for rows in (32, 64, 128, 256, 512, 2048):
        x = torch.randn(rows, len(dense), device=device).half()
        ceiling = time_graph(lambda x=x: torch.mm(x, dense))  # type: ignore[misc]
        ways: dict[str, Callable[[], object]] = {"reconstruction": lambda x=x: weight.by_reconstruction(x)}  # type: ignore[misc]
        if rows <= weight.some_rows:
            arranged = arrange(x, weight.tile_order)
            ways["fused product"] = lambda arranged=arranged: weight.partial_sums(arranged)  # type: ignore[misc]
        for name, way in ways.items():
            seconds = time_graph(way)
            result.append(KernelRow(f"gate_up by {name}", rows, seconds * 1e6, ceiling * 1e6, "torch.mm in float16"))
    return result


def random_weight(k: int, widths: Sequence[int], mix: Sequence[tuple[int, float]], device: torch.device) -> TiledWeight:
    """Random codes of the widths in `mix` (bits, share of the rows), in groups of 128 rows, side by side."""
    quads = k // QUAD
    bits = [width for width, share in mix for _ in range(round(share * quads))][:quads]
    bits += [mix[-1][0]] * (quads - len(bits))
    runs = find_runs([width for width in bits for _ in range(4)], [tile // 4 for tile in range(k // TILE)], True)
    order = torch.randperm(k, device=device, dtype=torch.int32)
    matrices = []
    for width in widths:
        strips = width // STRIP
        words = strips * sum(run.quads * run.bits * QUAD for run in runs)
        codes = torch.randint(-(1 << 31), (1 << 31) - 1, (words,), dtype=torch.int32, device=device)
        # Scales of 4 bits and a unit of 1.9e-6: the high byte of each half of a word is that of the unit.
        scales = torch.randint(0, 1 << 24, (strips * quads * 8,), dtype=torch.int32, device=device) & 0x00FF00FF
        matrices.append(Tiled(codes, scales | 0x2000, runs, order, strips, width, False, None))
    weight: Weight = join(matrices)
    if not isinstance(weight, TiledWeight):
        raise TypeError("matrices of one order are one weight")
    return weight


def time_graph(work: Callable[[], object]) -> float:
    """Median seconds of a CUDA graph of `work`."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph, _ = record(work, stream=stream)
    times: list[float] = []
    for _ in range(REPEATS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times[3:])[REPEATS // 2]


def _products(group: Sequence[TiledWeight], rows: int, device: torch.device) -> Callable[[], object]:
    """Multiply the same activations by every weight of a group, as kernels hand them on: arranged, to partial sums."""
    x = torch.randn(rows, group[0].matrices[0].order.numel(), device=device)
    arranged = arrange(x, group[0].order)
    return lambda: [weight.partial_sums(arranged) for weight in group]


def _row(name: str, rows: int, seconds: float, ceiling: float) -> KernelRow:
    return KernelRow(name, rows, seconds * 1e6, ceiling * 1e6, "a read of the same bytes")
