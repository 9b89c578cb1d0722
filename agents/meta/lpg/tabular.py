"""Tabular agents of meta-training: tables of logits, trained by stochastic gradient descent.

All functions concern one lifetime. Axis legend: `T` transitions, `E` environments, `F` rows, `S`
states, `A` actions, `m` the size of predictions.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agents.meta.lpg import rule as rule_lib
from agents.networks import layers, tables
from agents.parts import returns
from podracers import environment, tasks, types


class Agent(NamedTuple):
    """Parameters of one agent; initially zero, so that it acts and predicts uniformly."""

    policy: jax.Array  # [S, A] logits
    prediction: jax.Array  # [S, m] logits


class Outputs(NamedTuple):
    """Outputs of an agent for time steps."""

    log_policy: jax.Array  # [..., A]
    log_prediction: jax.Array  # [..., m]


class Chunk(NamedTuple):
    """Consecutive transitions of the environments of a lifetime."""

    timestep: types.TimeStep  # [T + 1, E], of the environments
    action: jax.Array  # [T, E]


class Update(NamedTuple):
    """Intermediate results of an agent's update."""

    outputs: Outputs  # [T + 1, E] before the update
    targets: rule_lib.Targets  # [T, E]


def init_agent(spec: environment.EnvironmentSpec, prediction_size: int) -> Agent:
    """Returns an initial agent.

    Args:
      spec: specification of lifetimes.
      prediction_size: `m`.
    """
    num_states = int(spec.observation[tasks.ROWS].maximum)
    num_actions = spec.observation[environment.ACTION_MASK].shape[-1]
    return Agent(jnp.zeros((num_states, num_actions)), jnp.zeros((num_states, prediction_size)))


def outputs(agent: Agent, observation: dict[str, jax.Array]) -> Outputs:
    """Returns the outputs of an agent; illegal actions have no probability."""
    prediction = tables.sum_rows(agent.prediction, observation[tasks.ROWS])
    return Outputs(log_policy(agent.policy, observation), jax.nn.log_softmax(prediction))


def log_policy(logits: jax.Array, observation: dict[str, jax.Array]) -> jax.Array:
    """Returns the log-probabilities of a policy, `[..., A]`, from its table of logits `[S, A]`."""
    legal = observation[environment.ACTION_MASK]
    sums = tables.sum_rows(logits, observation[tasks.ROWS])
    return jax.nn.log_softmax(jnp.where(legal, sums, layers.MASKED))


def entropy(log_probs: jax.Array) -> jax.Array:
    """Returns the entropies, in nats, of distributions along the last axis."""
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


def mean(values: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns the weighted mean, a scalar."""
    return jnp.sum(values * weight) / jnp.maximum(jnp.sum(weight), 1.0)


@jax.named_scope("agent_update")
def learn(
    rule: rule_lib.Rule,
    rule_params: types.PyTree,
    agent: Agent,
    chunk: Chunk,
    learning_rate: jax.Array | float,
    prediction_cost: jax.Array | float,
    exact: bool = True,
) -> tuple[Agent, Update]:
    """Takes one update of an agent by the rule; differentiable by `rule_params` and `agent`.

    The agent's gradient treats the rule's targets as constants. Targets of later updates depend on
    earlier updates, through the agent's outputs.

    Args:
      rule: the update rule.
      rule_params: parameters of the rule.
      agent: agent before the update.
      chunk: its transitions.
      learning_rate: learning rate of stochastic gradient descent, for the mean over the chunk.
      prediction_cost: weight of the divergence of predictions from their targets.
      exact: whether derivatives of the result include that dependence; otherwise the rule's
        inputs are constants (as in Jackson et al. 2023).
    """
    timestep, action = chunk
    before = outputs(agent, timestep.observation)
    prediction = jnp.exp(before.log_prediction)
    window = rule_lib.Window.of(timestep, action, before.log_policy[:-1], prediction)
    with jax.named_scope("rule"):
        targets = rule.targets(rule_params, window if exact else jax.lax.stop_gradient(window))
    weight = returns.weights(timestep)
    observation = jax.tree.map(lambda x: x[:-1], timestep.observation)

    def loss(agent: Agent) -> jax.Array:
        policy, divergence = rule_lib.losses(*outputs(agent, observation), action, targets)
        return mean(policy + prediction_cost * divergence, weight)

    gradient = jax.grad(loss)(agent)
    agent = jax.tree.map(lambda x, g: x - learning_rate * g, agent, gradient)
    return agent, Update(before, targets)


def learn_values(
    critic: jax.Array, timestep: types.TimeStep, gamma: float, gae_lambda: float, step_size: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the table of values after a chunk, and advantages under the table before it.

    Each state's value moves towards the mean of its lambda-returns.

    Args:
      critic: `[S]`.
      timestep: `[T + 1, E]`.
      gamma: discount.
      gae_lambda: trace parameter.
      step_size: step size of the values; 1 replaces a value by that mean.

    Returns:
      `[S]` and `[T, E]`.
    """
    rows = timestep.observation[tasks.ROWS]
    values = tables.sum_rows(critic[:, None], rows)[..., 0]
    advantage = returns.gae(timestep, values, gamma, gae_lambda)
    weight, rows = returns.weights(timestep)[..., None], rows[:-1]
    # The rows whose sum is a value share its error equally.
    share = advantage[..., None] / jnp.maximum(
        jnp.sum(rows < critic.shape[0], axis=-1, keepdims=True), 1
    )
    zeros = jnp.zeros_like(critic)
    error = zeros.at[rows].add(weight * share, mode="drop")
    count = zeros.at[rows].add(jnp.broadcast_to(weight, rows.shape), mode="drop")
    return critic + step_size * error / jnp.maximum(count, 1.0), advantage


def merged(timestep: types.TimeStep) -> types.TimeStep:
    """Returns the time steps of the environments of lifetimes, `[..., E]`.

    The end of a lifetime ends the episodes of its environments.

    Args:
      timestep: time steps of lifetimes, `[...]`; observations hold those of the environments.
    """
    observation: dict[str, Any] = dict(timestep.observation)
    reward, discount = observation.pop(tasks.REWARD), observation.pop(tasks.DISCOUNT)
    step_type = observation.pop(tasks.STEP_TYPE)
    step_type = jnp.where(timestep.last()[..., None], types.LAST, step_type).astype(jnp.int8)
    del observation[tasks.TASK]
    return types.TimeStep(observation, reward, discount, step_type)
