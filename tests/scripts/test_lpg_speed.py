"""Tests of the benchmark of meta-training: its baseline is the same algorithm, and it runs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agents.meta import lpg
from agents.meta.lpg import meta_training, tabular
from environments.meta import delayed_chains, lifetimes, tabular_grids
from podracers import environment, tasks, types
from tests import processes

HIDDEN, PREDICTION = 4, 3
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # to compile


@pytest.fixture(scope="module")
def baseline(tools):
    families = (
        tabular_grids.TabularGrids(("small",)),
        delayed_chains.DelayedChains(("distractor",), short=(2, 4)),
    )
    lives = lifetimes.Lifetimes(lifetimes.Mixture(families), 2, min_periods=3, max_periods=3)
    file = tools("benchmarks.single_file_lpg").single_file_lpg
    return lives, file.SingleFileLPG(lives, 2, HIDDEN, PREDICTION)


def _recorded(baseline, params, lifetime, keys):
    """Returns what happened in each chunk: time steps of the environments, actions, advantages."""
    observe, recorded = type(baseline)._moment, []

    def moment(timestep):
        shown = timestep.observation
        names = (tasks.ROWS, environment.ACTION_MASK)
        step = types.TimeStep(
            {name: shown[name] for name in names},
            *(shown[name] for name in (tasks.REWARD, tasks.DISCOUNT, tasks.STEP_TYPE)),
        )
        return observe(baseline, timestep) | {"step": step}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baseline, "_moment", moment)
        for key in keys:
            lifetime, moments, action, advantage = baseline._act(lifetime, key)
            recorded.append((moments["step"], action, advantage))
            kernels, _ = baseline._learn(params, lifetime.kernels, moments, action)
            lifetime = lifetime._replace(kernels=kernels)
    return jax.tree.map(lambda *x: jnp.stack(x), *recorded)


def _as_ours(params):
    """Returns the parameters of the baseline's rule in the names of the library's."""
    params = params["params"]
    cell = params["OptimizedLSTMCell_0"]
    kernels = [[cell[part + gate]["kernel"] for gate in "ifgo"] for part in "ih"]
    bias = jnp.concatenate([cell[f"h{gate}"]["bias"] for gate in "ifgo"])
    return {
        "Dense_0": params["Dense_0"],
        "Dense_1": params["Dense_1"],
        "lstm": {
            "input": {
                "kernel": jnp.concatenate(kernels[0], axis=1),
                # The library's forget gate has a bias of one beside the learnt one.
                "bias": bias - jnp.repeat(jnp.array([0.0, 1.0, 0.0, 0.0]), HIDDEN),
            },
            "recurrent": jnp.concatenate(kernels[1], axis=1),
        },
        "prediction": params["Dense_2"],
        "policy": params["Dense_3"],
    }


@pytest.mark.slow
def test_the_baseline_has_the_librarys_meta_gradient(baseline):
    lives, plain = baseline
    rates = {"agent_learning_rates": (40.0,), "prediction_costs": (0.5,)}
    agent = lpg.LPG(lives.spec, hidden_size=HIDDEN, prediction_size=PREDICTION, **rates)
    state = plain.init(1)  # a lifetime in each kind of task
    params = jax.tree.map(lambda x: 2.0 * x + 0.1, state.params)  # one that teaches something
    key = jax.random.key(1)
    last_key, *chunk_keys = jax.random.split(key, agent.updates + 1)

    @jax.jit
    @jax.value_and_grad
    def theirs(params, lifetime):
        return plain._lifetime_loss(params, lifetime, key)[0]

    @jax.jit
    @jax.value_and_grad
    def ours(params, batch):
        rows = jax.tree.map(lambda x: x[None], batch)
        return agent._loss(_as_ours(params), rows).metrics["loss/total"].result()

    record = jax.jit(lambda lifetime: _recorded(plain, params, lifetime, [*chunk_keys, last_key]))
    for number in range(2):
        lifetime = jax.tree.map(lambda x, number=number: x[number], state.lifetimes)
        timestep, action, advantage = record(lifetime)
        _, values = agent._values(lifetime.critic, timestep)
        np.testing.assert_allclose(values, advantage, rtol=1e-4, atol=1e-5)
        newborn, chunk = tabular.Agent(*lifetime.kernels), tabular.Chunk(timestep, action)
        batch = meta_training._Batch(newborn, chunk, jnp.int32(0), advantage[-1])
        expected, gradient = ours(params, batch)
        found, own = theirs(params, lifetime)
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(gradient)):
            assert jnp.any(other != 0.0)
            np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-5)
    assert len(set(np.asarray(state.lifetimes.timestep.observation[tasks.TASK]))) == 2


@pytest.mark.slow
def test_the_baseline_learns_and_lives_end(baseline):
    lives, plain = baseline
    state = plain.init(0)
    before = jax.tree.map(np.asarray, state.params)
    ages = []
    for _ in range(4):
        state, loss = plain.step(state, 1)
        assert np.isfinite(loss)
        ages.append(int(state.lifetimes.environment.time[0]))
    assert ages == [lives.period, 2 * lives.period, 0, lives.period]
    changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, state.params)
    assert all(jax.tree.leaves(changed))


@pytest.mark.slow
def test_meta_training_is_measured(tmp_path):
    file = tmp_path / "result.json"
    bindings = ["NUM_ENVS = 2", "Lifetimes.num_envs = 2", "LPG.hidden_size = 4"]
    flags = [part for each in bindings for part in ("--gin_bindings", each)]
    result = processes.run(
        "benchmark", "lpg", "--repeats", 1, "--json", file, *flags, environment=QUICK
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(file.read_text())["results"]["lpg"]
    assert "2 lifetimes x 2 environments x T = 20 x (K + 1 = 6) = 480" in found["about"]
    rows = {(row["measure"], row["case"]["program"]): row["median"] for row in found["rows"]}
    for program in ("Anakin", "Anakin, recomputing", "one file, one-hot"):
        assert rows["speed", program] > 0.0
        assert rows["memory of the compiled update", program] > 1e5
    ratio = rows["ratio, turn by turn", "Anakin / one file, one-hot"]
    share = rows["speed", "Anakin"] / rows["speed", "one file, one-hot"]
    assert ratio == pytest.approx(share, rel=1e-2)
