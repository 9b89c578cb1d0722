"""The agents that are meta-trained with: tables of logits, learnt by stochastic gradient descent.

Everything here is of one lifetime. Axis legend: `T` transitions, `E` environments, `F` rows, `S`
states, `A` actions, `m` the size of predictions.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agents import returns
from agents.meta.lpg import rule as rule_lib
from agents.networks import tables
from podracers import environment, tasks, types

_ILLEGAL = -1e9  # logit of an action that is masked


class Agent(NamedTuple):
    """What one agent has learnt; zeros at birth, so it acts and predicts uniformly."""

    policy: jax.Array  # [S, A] logits
    prediction: jax.Array  # [S, m] logits


class Outputs(NamedTuple):
    """What an agent says of time steps."""

    log_policy: jax.Array  # [..., A]
    log_prediction: jax.Array  # [..., m]


class Chunk(NamedTuple):
    """Consecutive transitions of the environments of a lifetime."""

    timestep: types.TimeStep  # [T + 1, E], of the environments; observations as a lifetime shows
    action: jax.Array  # [T, E]


class Update(NamedTuple):
    """What one update of an agent was made of, beside the agent."""

    outputs: Outputs  # [T + 1, E] before the update
    targets: rule_lib.Targets  # [T, E]


def newborn(spec: environment.EnvironmentSpec, prediction_size: int) -> Agent:
    """Returns an agent that has learnt nothing.

    Args:
      spec: of lifetimes.
      prediction_size: `m`.
    """
    num_states = int(spec.observation[tasks.ROWS].maximum)
    num_actions = spec.observation[environment.ACTION_MASK].shape[-1]
    return Agent(jnp.zeros((num_states, num_actions)), jnp.zeros((num_states, prediction_size)))


def outputs(agent: Agent, observation: dict[str, jax.Array]) -> Outputs:
    """Returns what an agent says of observations; the mask is respected."""
    prediction = tables.sum_rows(agent.prediction, observation[tasks.ROWS])
    return Outputs(log_policy(agent.policy, observation), jax.nn.log_softmax(prediction))


def log_policy(logits: jax.Array, observation: dict[str, jax.Array]) -> jax.Array:
    """Returns the logarithms of a policy's probabilities, `[..., A]`, from its table `[S, A]`."""
    legal = observation[environment.ACTION_MASK]
    found = jnp.where(legal, tables.sum_rows(logits, observation[tasks.ROWS]), _ILLEGAL)
    return jax.nn.log_softmax(found)


def entropy(log_probs: jax.Array) -> jax.Array:
    """Returns the entropies, in nats, of distributions along the last axis."""
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


def log_prob(log_policy: jax.Array, action: jax.Array) -> jax.Array:
    """Returns the logarithm of the probability of actions, in the shape of `action`."""
    return jnp.take_along_axis(log_policy, action[..., None], axis=-1)[..., 0]


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

    The rule's targets are constants to the agent's gradient. What they depend on is the agent's own
    outputs, and through those the targets of later updates depend on earlier ones.

    Args:
      rule: how targets come about.
      rule_params: of the rule.
      agent: before the update.
      chunk: what it lived through.
      learning_rate: of stochastic gradient descent, on the mean over the chunk.
      prediction_cost: weight of the divergence of predictions from their targets.
      exact: whether that dependence counts in derivatives of the result; otherwise the rule's
        inputs are constants (Jackson et al. 2023 stop them).
    """
    timestep, action = chunk
    said = outputs(agent, timestep.observation)
    prediction = jnp.exp(said.log_prediction)
    window = rule_lib.Window(
        reward=timestep.reward[1:],
        discount=timestep.discount[1:],
        last=timestep.last()[1:],
        action_prob=jnp.exp(log_prob(said.log_policy[:-1], action)),
        prediction=prediction[:-1],
        next_prediction=prediction[1:],
    )
    with jax.named_scope("rule"):
        targets = rule.targets(rule_params, window if exact else jax.lax.stop_gradient(window))
    weight = returns.weights(timestep)
    observation = jax.tree.map(lambda x: x[:-1], timestep.observation)

    def loss(agent: Agent) -> jax.Array:
        now = outputs(agent, observation)
        losses = rule_lib.agent_loss(
            log_prob(now.log_policy, action), now.log_prediction, targets, prediction_cost
        )
        return mean(losses, weight)

    gradient = jax.grad(loss)(agent)
    agent = jax.tree.map(lambda x, g: x - learning_rate * g, agent, gradient)
    return agent, Update(said, targets)


def learn_values(
    critic: jax.Array,
    timestep: types.TimeStep,
    gamma: float,
    gae_lambda: float,
    step_size: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns a table of values after a chunk, and the advantages under the one before.

    Each state's value moves towards the mean of its lambda-returns.

    Args:
      critic: `[S]`.
      timestep: `[T + 1, E]`.
      gamma: the discount.
      gae_lambda: trace parameter.
      step_size: 1 replaces a value by that mean.

    Returns:
      `[S]` and `[T, E]`.
    """
    rows = timestep.observation[tasks.ROWS]
    values = tables.sum_rows(critic[:, None], rows)[..., 0]
    advantage = returns.gae(timestep, values, gamma, gae_lambda)
    weight, rows = returns.weights(timestep)[..., None], rows[:-1]
    # Where several rows make a value, they share its error.
    each = advantage[..., None] / jnp.maximum(
        jnp.sum(rows < critic.shape[0], axis=-1, keepdims=True), 1
    )
    zeros = jnp.zeros_like(critic)
    error = zeros.at[rows].add(weight * each, mode="drop")
    count = zeros.at[rows].add(jnp.broadcast_to(weight, rows.shape), mode="drop")
    return critic + step_size * error / jnp.maximum(count, 1.0), advantage


def merged(timestep: types.TimeStep) -> types.TimeStep:
    """Returns the time steps of the environments of lifetimes, `[..., E]`.

    Where a lifetime ends, the episodes of its environments are cut.

    Args:
      timestep: of lifetimes, `[...]`, whose observations hold those of their environments.
    """
    shown: dict[str, Any] = dict(timestep.observation)
    reward, discount = shown.pop(tasks.REWARD), shown.pop(tasks.DISCOUNT)
    step_type = shown.pop(tasks.STEP_TYPE)
    step_type = jnp.where(timestep.last()[..., None], types.LAST, step_type).astype(jnp.int8)
    del shown[tasks.TASK]
    return types.TimeStep(shown, reward, discount, step_type)
