"""Numbers as distributions: against rlax, literals, and backwards."""

import jax
import jax.numpy as jnp
import numpy as np
import rlax

from agents.parts import categorical

NUMBERS = np.array([-700.0, -30.5, -1.0, -1e-3, 0.0, 1e-4, 0.3, 1.0, 2.0, 99.0, 900.0], np.float32)


def test_the_transform_is_that_of_rlax_and_its_inverse_is_exact():
    squashed = categorical.signed_hyperbolic(NUMBERS)
    np.testing.assert_allclose(squashed, rlax.signed_hyperbolic(NUMBERS), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(categorical.signed_parabolic(squashed), NUMBERS, rtol=2e-6)
    np.testing.assert_allclose(categorical.signed_hyperbolic(3.0), 1.003, rtol=1e-6)


def test_the_gradient_is_finite_at_zero():
    for function in (categorical.signed_hyperbolic, categorical.signed_parabolic):
        slope = jax.grad(function)(1e-12)
        assert np.isfinite(slope)
        assert slope > 0.4


def test_encoding_is_that_of_rlax_and_decoding_undoes_it():
    support = categorical.Support(30.0, 61)
    pair = rlax.muzero_pair(-30.0, 30.0, 61, rlax.SIGNED_HYPERBOLIC_PAIR)
    encoded = support.encode(NUMBERS)
    np.testing.assert_allclose(encoded, pair.apply(NUMBERS), atol=2e-5)
    np.testing.assert_allclose(jnp.sum(encoded, axis=-1), 1.0, rtol=1e-5)
    logits = jax.random.normal(jax.random.key(0), (5, 61))
    expected = pair.apply_inv(jax.nn.softmax(logits))
    np.testing.assert_allclose(support.decode(logits), expected, rtol=1e-3, atol=1e-3)
    decoded = support.decode(jnp.log(encoded + 1e-30))
    np.testing.assert_allclose(decoded, NUMBERS, rtol=1e-3, atol=1e-5)


def test_numbers_beyond_the_support_are_clipped_and_reported():
    support = categorical.Support(2.0, 5)
    largest = categorical.signed_parabolic(2.0)
    x = jnp.array([largest * 0.99, largest * 1.01, -largest * 5.0])
    np.testing.assert_array_equal(support.beyond(x), [False, True, True])
    np.testing.assert_allclose(support.encode(x)[1:, [-1, 0]], np.eye(2), atol=1e-6)


def test_cross_entropy():
    support = categorical.Support(1.0, 3)
    logits = jnp.log(jnp.array([0.2, 0.3, 0.5]))
    x = categorical.signed_parabolic(jnp.float32(0.4))
    expected = -(0.6 * np.log(0.3) + 0.4 * np.log(0.5))
    np.testing.assert_allclose(support.cross_entropy(logits, x), expected, rtol=1e-5)
