"""The tokens that can still be drawn: what every step takes and gives."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Candidates(NamedTuple):
    """Tokens that can still be drawn: `logits` [n] and `ids` [n]. The ids ascend, so that ties fall to the lowest.

    There is at least one, and all logits are finite. Probabilities are softmax(logits) of whoever is left: a step that
    drops tokens need not renormalise.
    """

    logits: NDArray[np.float32]
    ids: NDArray[np.int64]

    def keep(self, which: NDArray[np.int64]) -> "Candidates":
        """Those at the ascending indices `which`."""
        return Candidates(self.logits[which], self.ids[which])
