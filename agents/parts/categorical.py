"""Values and rewards as categorical distributions over a fixed support (two-hot), as in MuZero.

A scalar is squashed, so that one support serves returns of any size, and then split between its two
neighbouring atoms. Schrittwieser et al., "Mastering Atari, Go, chess and shogi by
planning with a learned model", 2020, https://arxiv.org/abs/1911.08265, appendix F.

rlax's formulas are not used because of float32: for numbers from 0.1 to 1, its inverse of the
squashing has a relative error of 1e-3 (here 3e-7), and its probabilities of 1e-5.

Axis legend: `Z` atoms.
"""

import dataclasses

import jax
import jax.numpy as jnp

from podracers import errors

_SLOPE = 1e-3  # slope of the linear part, which makes the inverse Lipschitz


def signed_hyperbolic(x: jax.Array) -> jax.Array:
    """Returns `sign(x) * (sqrt(|x| + 1) - 1) + 0.001 x`.

    Pohlen et al., "Observe and Look Further: Achieving Consistent Performance on Atari", 2018,
    https://arxiv.org/abs/1805.11593.
    """
    size = jnp.abs(x)
    # sqrt(1 + s) - 1, without the cancellation for small s.
    return jnp.sign(x) * size / (jnp.sqrt(size + 1.0) + 1.0) + _SLOPE * x


def signed_parabolic(x: jax.Array) -> jax.Array:
    """Returns the inverse of `signed_hyperbolic`."""
    # The root of a quadratic equation, in the form in which nothing cancels.
    rest = jnp.abs(x)
    half = 1.0 + 2.0 * _SLOPE
    root = 2.0 * rest / (half + jnp.sqrt(half * half + 4.0 * _SLOPE * rest))  # sqrt(|y| + 1) - 1
    return jnp.sign(x) * root * (root + 2.0)


@dataclasses.dataclass(frozen=True)
class Support:
    """Evenly spaced atoms from `-bound` to `bound`, in squashed units.

    Attributes:
      bound: largest atom. 30 represents returns of 905, and 300 of 58,706.
      num_atoms: `Z`, odd, so that zero is an atom.
    """

    bound: float = 30.0
    num_atoms: int = 61

    def __post_init__(self):
        if not self.bound > 0.0 or self.num_atoms < 3 or self.num_atoms % 2 == 0:
            raise errors.UserError(
                f"a support needs a positive bound and an odd number of atoms, 3 or more; got "
                f"bound = {self.bound}, atoms = {self.num_atoms}"
            )

    def encode(self, x: jax.Array) -> jax.Array:
        """Returns the two-hot probabilities `[..., Z]` of `x` `[...]`, clipped to the support."""
        spacing = 2.0 * self.bound / (self.num_atoms - 1)
        place = (signed_hyperbolic(x) + self.bound) / spacing  # index of the atom, a fraction
        place = jnp.clip(place, 0.0, self.num_atoms - 1.0)
        # Each atom has a triangle that reaches to its two neighbours: no gather and no scatter.
        distance = jnp.abs(place[..., None] - jnp.arange(self.num_atoms))
        return jnp.maximum(1.0 - distance, 0.0)

    def decode(self, logits: jax.Array) -> jax.Array:
        """Returns the number `[...]` whose squashed value is the mean under `logits` `[..., Z]`."""
        atoms = jnp.linspace(-self.bound, self.bound, self.num_atoms)
        return signed_parabolic(jnp.sum(jax.nn.softmax(logits, axis=-1) * atoms, axis=-1))

    def beyond(self, x: jax.Array) -> jax.Array:
        """Returns whether `x` lies outside of the support, bool `[...]`."""
        return jnp.abs(signed_hyperbolic(x)) > self.bound

    def cross_entropy(self, logits: jax.Array, x: jax.Array) -> jax.Array:
        """Returns the cross-entropy `[...]` of `logits` `[..., Z]` with the encoding of `x`."""
        return -jnp.sum(self.encode(x) * jax.nn.log_softmax(logits, axis=-1), axis=-1)
