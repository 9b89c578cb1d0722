"""DiscoRL's rule: its parameters, its arithmetic, and its inputs at the ends of episodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents.meta.rules import disco, disco_network, interface
from agents.networks import layers
from podracers import errors, parallel, types
from tests.agents import experience

P = jax.sharding.PartitionSpec
RULE = disco.Disco()
LENGTH, STREAMS, ACTIONS = 4, 2, 3


def _wave(shape, phase, scale=1.0):
    """Returns pseudo-random numbers in [-scale, scale]."""
    numbers = np.sin(phase + 12.9898 * np.arange(np.prod(shape)) ** 1.1)
    return np.asarray(scale * numbers.reshape(shape), np.float32)


def _params():
    return {
        name: _wave(shape, i, 0.1 if name.endswith("/b") else 1.4 * float(shape[-2]) ** -0.5)
        for i, (name, shape) in enumerate(sorted(disco_network.shapes().items()))
    }


def _outputs(phase):
    lead = (LENGTH + 1, STREAMS)
    return {
        "policy": _wave((*lead, ACTIONS), phase),
        "y": _wave((*lead, 600), phase + 1, 3.0),
        "z": _wave((*lead, ACTIONS, 600), phase + 2, 3.0),
        "next_policy": _wave((*lead, ACTIONS, ACTIONS), phase + 3),
        "q": _wave((*lead, ACTIONS, 601), phase + 4),
    }


def _experience():
    """Returns a rollout; the episode of the second stream terminates on the last arrival."""
    shape = (LENGTH + 1, STREAMS)
    reward = jnp.zeros(shape).at[1:].set(_wave((LENGTH, STREAMS), 70))
    step_type = jnp.full(shape, types.MID, jnp.int8).at[-1, 1].set(types.LAST)
    discount = jnp.ones(shape).at[-1, 1].set(0.0)
    return interface.Experience(
        timestep=types.TimeStep(jnp.zeros(shape), reward, discount, step_type),
        action=jnp.array([[0, 2], [1, 1], [2, 0], [0, 1]], jnp.int32),
        behaviour=jnp.asarray(_wave((*shape, ACTIONS), 60)[:-1]),
        outputs=_outputs(20),
    )


def _state():
    return RULE.init_state({"weight": jnp.zeros(2)})


def _teach_and_lose(params, state, experience, target_outputs):
    """Returns targets, the state after them, and the parts of the loss."""
    agent_params = {"weight": jnp.ones(2)}
    targets, state = RULE.teach(params, state, experience, agent_params, lambda _: target_outputs)
    losses = RULE.losses(targets, experience.outputs, experience.action, experience.timestep)
    return targets, state, losses


def _mapped(num_devices=1):
    split = P(None, parallel.AXIS)
    layouts = (P(), P(), split, split), (split, P(), split)
    compiled = jax.jit(experience.on_devices(_teach_and_lose, num_devices, *layouts))
    return lambda *inputs: compiled(*inputs, _outputs(40))


@pytest.fixture(scope="module", name="teach")
def _teach():
    return _mapped()


def test_parameters_are_those_of_the_published_file():
    shapes = disco_network.shapes()
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 754_778
    assert len(shapes) == 42
    assert shapes["lstm/lstm/linear/w"] == (283, 1024)
    assert shapes["lstm/~/meta_lstm/~unroll/lstm/linear/w"] == (144, 512)
    assert shapes["lstm/sequential_1/conv1_d/w"] == (1, 516, 16)
    meta_params = jax.eval_shape(RULE.init, jax.random.key(0))
    assert {name: x.shape for name, x in meta_params.items()} == shapes


# Results of google-deepmind/disco_rl at 9059a29 after the second update with these inputs.
EXPECTED = {
    "policy": [
        [[0.018843, 0.025298, 0.02336], [0.022695, 0.028196, 0.032384]],
        [[0.020171, 0.021248, 0.020155], [0.027734, 0.030485, 0.032244]],
        [[0.019098, 0.020765, 0.021486], [0.028995, 0.028141, 0.027035]],
        [[0.024387, 0.023749, 0.024997], [0.0216, 0.026762, 0.025823]],
    ],
    "y": [[-0.078624, 0.034717, -0.103322, 0.046248], [-0.073504, 0.031511, -0.096887, 0.041605]],
    "z": [[-0.004862, -0.09155, 0.037179, -0.098545], [-0.028271, -0.104953, 0.034613, -0.067444]],
    "q": [
        [-0.613878, 0.072618],
        [-2.838338, 0.681693],
        [-3.509542, 0.527467],
        [-3.792561, -0.983801],
    ],
    "loss": [[5.273846, 4.674182], [4.79869, 4.761308], [4.913665, 4.623431], [4.737642, 4.409297]],
    "hidden": [0.083432, -0.054118, 0.062076, -0.068682],
}


def test_targets_and_losses_are_those_of_the_published_code(teach):
    experience, params = _experience(), _params()
    _, state, _ = teach(params, _state(), experience)
    targets, state, losses = teach(params, state, experience)
    total = sum(RULE.costs[name] * loss for name, loss in losses.items())
    outputs = {
        "policy": targets.predictions.policy,
        "y": targets.predictions.y[0, :, ::150],
        "z": targets.predictions.z[0, :, ::150],
        "q": targets.q,
        "loss": total,
        "hidden": state.network.hidden[::32],
    }
    for name, expected in EXPECTED.items():
        np.testing.assert_allclose(outputs[name], expected, rtol=1e-4, atol=2e-5, err_msg=name)
    np.testing.assert_allclose(state.target_params["weight"], 1.0 - 0.9**2, rtol=1e-6)


def test_targets_do_not_depend_on_ignored_transitions(teach):
    experience, params = _experience(), _params()
    cut = experience.timestep.step_type.at[2, 0].set(types.LAST).at[3, 0].set(types.FIRST)
    for discount in (0.0, 1.0):
        timestep = experience.timestep._replace(
            step_type=cut, discount=experience.timestep.discount.at[2, 0].set(discount)
        )
        before = teach(params, _state(), experience._replace(timestep=timestep))
        # Ignored are the reward at FIRST, the action at LAST and its probability.
        other = experience._replace(
            timestep=timestep._replace(reward=timestep.reward.at[3, 0].add(5.0)),
            action=experience.action.at[2, 0].set(0),
            behaviour=experience.behaviour.at[2, 0, 0].add(1.0),
        )
        after = teach(params, _state(), other)
        jax.tree.map(np.testing.assert_array_equal, before[1], after[1])
        for x, y in zip(jax.tree.leaves(before[0]), jax.tree.leaves(after[0])):
            np.testing.assert_array_equal(x[:2], y[:2])
            np.testing.assert_array_equal(x[3:], y[3:])


@pytest.mark.slow
def test_the_number_of_devices_changes_nothing(teach):
    one, two = (run(_params(), _state(), _experience()) for run in (teach, _mapped(2)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), one, two)


def test_gradients_of_the_loss_stop_at_values_and_the_next_policy(teach):
    experience = _experience()
    targets, _, _ = teach(_params(), _state(), experience)

    def loss(outputs):
        losses = RULE.losses(targets, outputs, experience.action, experience.timestep)
        return sum(map(jnp.sum, losses.values()))

    gradient = jax.jit(jax.grad(loss))(experience.outputs)
    assert not np.any(gradient["policy"][-1])  # the target of the next policy alone
    for name, x in gradient.items():
        assert np.any(x[:-1]), name
    assert not np.any(gradient["next_policy"][-2, 1])  # into a termination


def test_losses_ignore_illegal_actions(teach):
    experience = _experience()
    targets, _, usual = teach(_params(), _state(), experience)
    logits = experience.outputs["policy"].copy()
    logits[..., 2] = layers.MASKED
    masked = {**experience.outputs, "policy": logits}
    losses = jax.jit(RULE.losses)(targets, masked, experience.action, experience.timestep)
    assert np.max(losses["policy"]) < 5.0 and np.max(losses["next_policy"]) < 5.0
    target = jax.nn.softmax(targets.predictions.policy[..., :2])
    log_policy = jax.nn.log_softmax(logits[:-1, :, :2])
    expected = np.sum(target * (np.log(target) - log_policy), axis=-1)
    np.testing.assert_allclose(losses["policy"], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(losses["y"], usual["y"])


def _save(path, changes):
    arrays = {name: np.zeros(shape, np.float32) for name, shape in disco_network.shapes().items()}
    arrays |= changes
    np.savez(path, **{name: x for name, x in arrays.items() if x is not None})


def test_a_file_is_loaded_as_it_is(tmp_path):
    path = tmp_path / "disco_103.npz"
    _save(path, {})
    rule, params = disco.load(path)
    assert rule == RULE and set(params) == set(disco_network.shapes())
    assert disco.load() == (RULE, None)


WRONG = np.zeros(7, np.float32)
NAN = np.full(256, np.nan, np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "there is no rule"),
        (b"", "not the file of a rule: EOFError"),
        ({"lstm/linear/b": np.array([{}])}, "ValueError: Object arrays cannot be loaded"),
        ({"lstm/linear/b": NAN}, "expected finite numbers in 'lstm/linear/b'"),
        ({"lstm/linear/b": None}, r"expected 'lstm/linear/b' float32 \(256,\), got nothing"),
        ({"lstm/linear/b": WRONG}, r"'lstm/linear/b' float32 \(256,\), got float32 \(7,\)"),
        ({"lstm/more/b": WRONG}, "expected 'lstm/more/b' nothing, got float32"),
    ],
)
def test_files_of_other_rules_are_user_errors(tmp_path, changes, message):
    path = tmp_path / "rule.npz"
    if isinstance(changes, dict):
        _save(path, changes)
    elif changes is not None:
        path.write_bytes(changes)
    with pytest.raises(errors.UserError, match=message):
        disco.load(path)
