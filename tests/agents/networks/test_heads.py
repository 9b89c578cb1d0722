"""Action heads against distrax, numerical integration and counted samples."""

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from agents.networks import heads
from tests import streams

DISCRETE = specs.DiscreteArray(4)
MULTI = specs.BoundedArray((3,), np.int32, 0, [1, 3, 2])
BOX = specs.BoundedArray((2,), np.float32, [-1.0, 0.0], [1.0, 5.0])
NUM_ROWS = 20_000

HEADS = {
    "categorical": heads.from_spec(DISCRETE),
    "multi_discrete": heads.from_spec(MULTI),
    "gaussian": heads.from_spec(BOX),
    "tanh_gaussian": heads.from_spec(BOX, "tanh_gaussian"),
}
SIZES = {"categorical": (4,), "multi_discrete": (2, 4, 3)}
MASKS = {
    "categorical": np.array([[True, False, True, True], [False, True, False, False]]),
    "multi_discrete": np.array(
        [
            [[True, True, True, True], [True, False, False, True], [False, True, True, True]],
            [[False, True, False, False], [True] * 4, [True, False, False, False]],
        ]
    ),
}


def _outputs(head, rows=2, seed=0, scale=1.0):
    noise = np.random.default_rng(seed).normal(size=(rows, head.num_outputs))
    return np.float32(scale * noise)


def _every_value(*num_values):
    """Returns every action of a discrete head, `[N, D]`."""
    grids = np.meshgrid(*(np.arange(n) for n in num_values), indexing="ij")
    return np.stack(grids, -1).reshape(-1, len(num_values)).astype(np.int32)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_discrete_heads_are_products_of_distrax_categoricals(name, masked):
    head, mask = HEADS[name], MASKS[name] if masked else None
    outputs = _outputs(head)
    legal = np.arange(4) < np.reshape(SIZES[name], (-1, 1))  # [D, A]
    legal = legal & np.reshape(mask, (2, -1, 4)) if masked else legal
    logits = np.where(legal, outputs.reshape(2, -1, 4), -np.inf)
    values = _every_value(*SIZES[name])[:, None]  # [N, 1, D]
    raw = values if name == "multi_discrete" else values[..., 0]

    def theirs(logits):
        expected = distrax.Categorical(logits)
        log_prob, entropy = expected.log_prob(values), expected.entropy()
        return jnp.exp(log_prob.sum(-1)), entropy.sum(-1), expected.mode()

    def ours(outputs):
        log_prob, entropy = head.log_prob(outputs, mask, raw), head.entropy(outputs, mask)
        return jnp.exp(log_prob), entropy, head.mode(outputs, mask).reshape(2, -1)

    actual, expected = streams.evaluate(ours, outputs), streams.evaluate(theirs, logits)
    streams.assert_close(actual, expected, rtol=0.0)


@pytest.mark.parametrize("name", SIZES)
def test_samples_follow_the_probabilities_and_never_the_mask(name):
    head, mask = HEADS[name], MASKS[name][0]
    outputs = _outputs(head, rows=1)
    keys = jax.random.split(jax.random.key(3), NUM_ROWS)
    rows = np.broadcast_to(outputs, (NUM_ROWS, head.num_outputs))
    masks = np.broadcast_to(mask, (NUM_ROWS, *mask.shape))
    raw = streams.evaluate(head.sample, rows, masks, keys)
    assert raw.dtype == np.int32
    values = _every_value(*SIZES[name])  # [N, D]
    samples = values.reshape(-1, *raw.shape[1:])
    p = np.exp(streams.evaluate(head.log_prob, outputs, mask[None], samples))
    frequency = (np.reshape(raw, (-1, 1, values.shape[1])) == values).all(-1).mean(0)
    np.testing.assert_allclose(frequency, p, atol=5.0 * np.sqrt(0.25 / NUM_ROWS))
    assert (p == 0.0).any() and (frequency[p == 0.0] == 0.0).all()


@pytest.mark.parametrize("name", SIZES)
def test_an_empty_mask_is_uniform_over_values_that_exist(name):
    head = HEADS[name]
    entropy = streams.evaluate(head.entropy, _outputs(head), np.zeros_like(MASKS[name]))
    np.testing.assert_allclose(entropy, np.log(SIZES[name]).sum(), rtol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_gradients_are_finite_under_masks_and_large_outputs(name):
    head, mask = HEADS[name], MASKS.get(name)
    keys = jax.random.split(jax.random.key(0), 2)
    raw = streams.evaluate(head.sample, _outputs(head), mask, keys)

    def loss(outputs):
        return jnp.sum(head.log_prob(outputs, mask, raw) + head.entropy(outputs, mask))

    slope = jax.jit(jax.grad(loss))
    for scale in (1.0, 30.0):
        gradient = np.asarray(slope(_outputs(head, scale=scale)))
        assert np.isfinite(gradient).all()
    if name == "categorical":  # illegal logits have no gradient
        np.testing.assert_array_equal(gradient[~mask], 0.0)


@pytest.mark.parametrize("name", HEADS)
def test_divergences_equal_those_of_distrax(name):
    """Those of means and of standard deviations hold the other one."""
    head, mask = HEADS[name], MASKS.get(name)
    target, outputs = _outputs(head), _outputs(head, seed=1)
    if name in SIZES:
        values = _every_value(*SIZES[name])[:, None]
        raw = values if name == "multi_discrete" else values[..., 0]
        log_p, log_q = (streams.evaluate(head.log_prob, x, mask, raw) for x in (target, outputs))
        expected = [np.sum(np.exp(log_p) * (log_p - log_q), axis=0)]
    else:
        mean, std = (np.stack([target, outputs])[:, :, part] for part in ([0, 1], [2, 3]))
        std, normal = np.exp(std), distrax.MultivariateNormalDiag

        def divergences(mean, std):
            others = normal(mean[1], std[0]), normal(mean[0], std[1])
            return [normal(mean[0], std[0]).kl_divergence(other) for other in others]

        expected = streams.evaluate(divergences, mean, std)
    kl = streams.evaluate(head.kl, target, outputs, mask)
    np.testing.assert_allclose(kl, expected, rtol=1e-4, atol=1e-6)


def test_gaussian_equals_distrax():
    head = HEADS["gaussian"]
    outputs = _outputs(head)
    raw = np.random.default_rng(5).normal(size=(2, 2)).astype(np.float32)

    def both():
        expected = distrax.MultivariateNormalDiag(outputs[:, :2], jnp.exp(outputs[:, 2:]))
        theirs = expected.log_prob(raw), expected.entropy(), outputs[:, :2]
        ours = head.log_prob(outputs, None, raw), head.entropy(outputs, None)
        return (*ours, head.mode(outputs, None)), theirs

    streams.assert_close(*streams.evaluate(both), rtol=1e-5)


@pytest.mark.parametrize("name", ["gaussian", "tanh_gaussian"])
def test_continuous_samples_have_their_moments_and_stay_within_bounds(name):
    head = HEADS[name]
    outputs = np.broadcast_to(_outputs(head, rows=1), (NUM_ROWS, 4))
    keys = jax.random.split(jax.random.key(1), NUM_ROWS)
    raw = streams.evaluate(head.sample, outputs, None, keys)
    std = np.exp(outputs[0, 2:])
    np.testing.assert_allclose(raw.mean(0), outputs[0, :2], atol=0.03)
    np.testing.assert_allclose(raw.std(0), std, rtol=0.03)
    to_action = jax.jit(head.to_action)
    action = np.asarray(to_action(10.0 * raw))
    assert action.dtype == np.float32
    assert (action >= BOX.minimum).all() and (action <= BOX.maximum).all()
    portion = np.clip(raw, -1.0, 1.0) if name == "gaussian" else np.tanh(raw)
    np.testing.assert_allclose(
        to_action(raw), [0.0, 2.5] + np.array([1.0, 2.5]) * portion, atol=1e-6
    )


@pytest.mark.parametrize(
    ("minimum", "maximum"), [(10.0, 20.0), (-0.4, 0.4), (-7.0, -6.0), (-4e37, 4e37)]
)
@pytest.mark.parametrize("name", ["gaussian", "tanh_gaussian"])
def test_a_policy_is_that_of_other_bounds_in_units_of_the_bounds(name, minimum, maximum):
    """Distributions are equal, and actions are the same portions of the intervals."""
    unit, head = (
        heads.from_spec(specs.BoundedArray((2, 1), np.float32, low, high), name)
        for low, high in ((-1.0, 1.0), (minimum, maximum))
    )
    outputs, target = _outputs(head), _outputs(head, seed=1)
    raw = streams.evaluate(head.sample, outputs, None, jax.random.split(jax.random.key(2), 2))

    def results(head):
        log_prob, entropy = head.log_prob(outputs, None, raw), head.entropy(outputs, None)
        return (log_prob, entropy, head.kl(target, outputs, None)), head.to_action(raw)

    (numbers, action), (expected, portion) = (
        streams.evaluate(lambda head=head: results(head)) for head in (head, unit)
    )
    streams.assert_same(numbers, expected)
    expected = minimum + (np.asarray(portion, np.float64) + 1.0) / 2.0 * (maximum - minimum)
    np.testing.assert_allclose(action, expected, rtol=1e-5)
    np.testing.assert_allclose(head.to_units(action), portion[..., 0], rtol=1e-5)
    np.testing.assert_array_equal(unit.to_units(portion), portion[..., 0])


def test_tanh_gaussian_is_a_density_of_the_action_in_units_of_the_bounds():
    head = heads.from_spec(specs.BoundedArray((), np.float32, 2.0, 6.0), "tanh_gaussian")
    outputs = np.float32([0.4, -0.5])
    raw = np.linspace(-6.0, 6.0, 4001, dtype=np.float32)[:, None]
    assert head.to_action(raw).shape == (4001,)
    action = np.tanh(np.asarray(raw[:, 0], np.float64))
    log_p = np.asarray(jax.jit(head.log_prob)(outputs, None, raw), np.float64)
    np.testing.assert_allclose(np.trapezoid(np.exp(log_p), action), 1.0, atol=1e-4)
    entropy = np.trapezoid(-np.exp(log_p) * log_p, action)
    np.testing.assert_allclose(streams.evaluate(head.entropy, outputs, None), entropy, atol=1e-3)
    np.testing.assert_allclose(head.to_action(head.mode(outputs, None)), 4.0 + 2.0 * np.tanh(0.4))


def test_tanh_gaussian_is_stable_far_out():
    head = heads.from_spec(specs.BoundedArray((2,), np.float32, -1.0, 1.0), "tanh_gaussian")
    zeros, raw = np.zeros(4, np.float32), np.float32([30.0, -30.0])
    far = streams.evaluate(head.log_prob, zeros, None, raw)
    slope = np.log(4.0) - 60.0  # log(1 - tanh(x)^2) tends to log 4 - 2 |x|
    np.testing.assert_allclose(far, 2.0 * (-450.0 - 0.5 * np.log(2 * np.pi) - slope), rtol=1e-6)


@pytest.mark.parametrize("name", HEADS)
def test_a_row_is_sampled_with_its_own_key_alone(name):
    head, mask = HEADS[name], MASKS.get(name)
    keys = jax.random.split(jax.random.key(0), 2)
    outputs = _outputs(head)
    sample = jax.jit(head.sample)
    both = np.asarray(sample(outputs, mask, keys))
    alone = np.asarray(sample(outputs[1:], None if mask is None else mask[1:], keys[1:]))
    np.testing.assert_array_equal(both[1], alone[0])
    assert isinstance(head, heads.ActionHead)
