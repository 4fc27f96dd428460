"""What a cache of fewer bits costs in accuracy, as it runs: `python benchmarks/cache_bits.py FOLDER [TEXT ...]`.

Perplexity, KL divergence from the cache that is not quantised, and how often the best token stays the same, over
pieces of 1000 tokens of the text files (by default this project's licence and README), in float32 on the CPU.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from exl2chat.engine.cache import BITS
from exl2chat.engine.transformer import Transformer
from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.model.tokenizer import open_tokenizer
from exl2chat.progress import silent

ROOT = Path(__file__).parents[1]
TEXTS = (ROOT / "LICENSE", ROOT / "README.md")
PIECE, MOST = 1000, 3


def predictions(model: Transformer, pieces: list[torch.Tensor], bits: int) -> torch.Tensor:
    """Log-probabilities [n, V] of what follows each token but the last of every piece."""
    model = replace(model, cache_bits=bits)
    logits = [model.forward(ids, model.new_cache(len(ids)))[:-1] for ids in pieces]
    return F.log_softmax(torch.cat(logits), -1)


def main(folder: Path, texts: list[Path]) -> None:
    checkpoint = open_checkpoint(folder)
    ids = open_tokenizer(checkpoint.folder).encode("\n".join(text.read_text() for text in texts))
    pieces = list(torch.tensor(ids).split(PIECE)[:MOST])
    model = Transformer.load(checkpoint, torch.device("cpu"), torch.float32, silent)
    targets = torch.cat([piece[1:] for piece in pieces])
    truth = predictions(model, pieces, BITS["fp16"])
    for name, bits in BITS.items():
        found = predictions(model, pieces, bits)
        perplexity = F.nll_loss(found, targets).exp().item()
        divergence = F.kl_div(found, truth, log_target=True, reduction="batchmean").item()
        same = (found.argmax(-1) == truth.argmax(-1)).float().mean().item()
        print(f"{name}: perplexity {perplexity:.3f}, KL {divergence:.4f}, same best token {same:.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]] or list(TEXTS))
