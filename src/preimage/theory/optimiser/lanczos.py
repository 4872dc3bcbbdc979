"""The Hessian's largest eigenvalues without the Hessian, by Lanczos.

Products are taken backward through the gradient. Forward mode, which curvature libraries use, has no rule for
the gradient of SiLU in torch 2.13, and gives wrong numbers for the gains of a LayerNorm.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from preimage.theory.optimiser.training_loss import TrainingLoss

_FIRST, _MOST = 4, 64  # eigenvalues asked for at first, and at most


@dataclass(frozen=True)
class TopOfSpectrum:
    """The largest eigenvalues, ascending, and for each how far from it an eigenvalue of H can be at most.

    ``covers`` says whether they reach below the value asked about, so that the nearest to it is among them.
    """

    eigenvalues: tuple[float, ...]
    errors: tuple[float, ...]
    covers: bool

    def nearest(self, value: float) -> tuple[float, float]:
        """The eigenvalue nearest to a value, and its error."""
        pairs = zip(self.eigenvalues, self.errors, strict=True)
        return min(pairs, key=lambda pair: abs(pair[0] - value))


def top_of_spectrum(loss: TrainingLoss, value: float, seed: int = 0) -> TopOfSpectrum:
    """Eigenvalues of the Hessian at the start, from the largest down to the first below ``value``.

    Cost: tens to hundreds of products, each two passes backward, and the memory of twenty vectors of
    parameters or more: two for every eigenvalue asked for.
    """
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh  # type: ignore[import-untyped]  # scipy carries no types

    size = len(loss.start)
    theta = loss.start.detach().requires_grad_()
    gradient = loss.gradient(theta)

    def product(vector: NDArray[np.float64]) -> NDArray[np.float64]:
        direction = torch.from_numpy(vector.ravel()).to(theta)
        (image,) = torch.autograd.grad(gradient, theta, direction, retain_graph=True)
        return np.asarray(image.cpu().numpy())

    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    start = np.random.default_rng(seed).standard_normal(size)
    wanted, most = min(_FIRST, size - 1), min(_MOST, size - 1)
    while True:
        try:
            eigenvalues, vectors = eigsh(operator, k=wanted, which="LA", v0=start)
        except ArpackNoConvergence as stopped:  # what did converge is still true
            eigenvalues, vectors = stopped.eigenvalues, stopped.eigenvectors
        covers = len(eigenvalues) == wanted and bool(eigenvalues.min() < value)
        if covers or len(eigenvalues) < wanted or wanted == most:
            break
        wanted = min(4 * wanted, most)
    order = np.argsort(eigenvalues)
    eigenvalues, vectors = eigenvalues[order], vectors[:, order]
    residuals = np.stack([product(vector) for vector in vectors.T], axis=1) - vectors * eigenvalues
    errors = np.sqrt((residuals**2).sum(axis=0))
    return TopOfSpectrum(tuple(eigenvalues.tolist()), tuple(errors.tolist()), covers)
