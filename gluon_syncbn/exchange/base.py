"""What every exchange does: add packed float64 vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Sequence

import numpy as np
from mxnet.context import Context


class Exchange(ABC):
    """Adds the packed statistics of one layer.

    The forward's vector is ``[count, sum[C], sum of squares[C]]``, the backward's ``[sum dy[C], sum dy*xhat[C]]``,
    both float64. One thread per layer and phase calls, never two for the same layer.
    """

    @abstractmethod
    def add(self, layer: int, contexts: Sequence[Context], rows: np.ndarray) -> np.ndarray:
        """Returns the sum over all rows.

        Parameters
        ----------
        layer : int
            Number of the layer, the same at every call.
        contexts : list of Context
            Where the rows come from.
        rows : numpy.ndarray, float64, (len(contexts), length)

        Returns
        -------
        numpy.ndarray, float64, (length,)

        Raises
        ------
        Exception
            Anything that keeps the sum from being complete. The step then fails with its text.
        """
