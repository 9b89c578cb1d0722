"""Numbers as distributions: against rlax, literals, and backwards."""

import jax
import numpy as np
import rlax

from agents.parts import categorical
from tests import streams

NUMBERS = np.array([-700.0, -30.5, -1.0, -1e-3, 0.0, 1e-4, 0.3, 1.0, 2.0, 99.0, 900.0], np.float32)


def test_the_transform_is_that_of_rlax_and_its_inverse_is_exact():
    squashed = categorical.signed_hyperbolic(NUMBERS)
    np.testing.assert_allclose(squashed, rlax.signed_hyperbolic(NUMBERS), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(categorical.signed_parabolic(squashed), NUMBERS, rtol=2e-6)
    np.testing.assert_allclose(categorical.signed_hyperbolic(3.0), 1.003, rtol=1e-6)


def test_the_gradient_is_finite_at_zero():
    for function in (categorical.signed_hyperbolic, categorical.signed_parabolic):
        slope = jax.jit(jax.grad(function))(1e-12)
        assert np.isfinite(slope)
        assert slope > 0.4


def test_encoding_is_that_of_rlax_and_decoding_undoes_it():
    support = categorical.Support(30.0, 61)
    pair = rlax.muzero_pair(-30.0, 30.0, 61, rlax.SIGNED_HYPERBOLIC_PAIR)
    encoded = streams.evaluate(support.encode, NUMBERS)
    np.testing.assert_allclose(encoded, streams.evaluate(pair.apply, NUMBERS), atol=2e-5)
    np.testing.assert_allclose(np.sum(encoded, axis=-1), 1.0, rtol=1e-5)
    logits = np.random.default_rng(0).normal(size=(5, 61)).astype(np.float32)
    expected = streams.evaluate(lambda x: pair.apply_inv(jax.nn.softmax(x)), logits)
    decoded = streams.evaluate(support.decode, logits)
    np.testing.assert_allclose(decoded, expected, rtol=1e-3, atol=1e-3)
    decoded = streams.evaluate(support.decode, np.log(encoded + np.float32(1e-30)))
    np.testing.assert_allclose(decoded, NUMBERS, rtol=1e-3, atol=1e-5)


def test_numbers_beyond_the_support_are_clipped_and_reported():
    support = categorical.Support(2.0, 5)
    largest = categorical.signed_parabolic(2.0)
    x = np.float32([largest * 0.99, largest * 1.01, -largest * 5.0])
    np.testing.assert_array_equal(streams.evaluate(support.beyond, x), [False, True, True])
    encoded = streams.evaluate(support.encode, x)
    np.testing.assert_allclose(encoded[1:, [-1, 0]], np.eye(2), atol=1e-6)


def test_cross_entropy():
    support = categorical.Support(1.0, 3)
    logits = np.log(np.float32([0.2, 0.3, 0.5]))
    x = streams.evaluate(categorical.signed_parabolic, np.float32(0.4))
    expected = -(0.6 * np.log(0.3) + 0.4 * np.log(0.5))
    loss = streams.evaluate(support.cross_entropy, logits, x)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
