"""Judges a policy: the first episode of each of many environments, through the agent's own `act`.

Counting only first episodes avoids the bias of a fixed number of steps, in which short episodes are
counted more often than long ones.

Axis legend: `P` population (absent where it is 1), `E` episodes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracers import agent as agent_lib
from podracers import environment as environment_lib
from podracers import errors, types
from podracers.training import check

DEFAULT_MAX_STEPS = 10_000  # agent steps, where the environment itself has no limit
_SALT = 0x5EED  # keeps evaluation apart from every stream of the runner
_PERIODIC, _FINAL = range(2)  # what an evaluation's key is folded from, besides the seed

# What acting's keys are folded from: a number that no episode has. Folding them from the key of the
# reset would give the very keys that `jax.random.split` makes of it inside the environment.
_ACTING = 2**31 - 1


class Episodes(NamedTuple):
    """What was reached, on the host."""

    returns: np.ndarray  # [P, E] float32, undiscounted, of the environment's own rewards
    lengths: np.ndarray  # [P, E] int32, agent steps
    finished: np.ndarray  # [P, E] bool; false where the episode outlasted the evaluation

    def mean_return(self) -> np.ndarray:
        """Returns the mean return of each member, `[P]` or a scalar."""
        return np.mean(self.returns, axis=-1)

    def standard_error(self) -> float:
        """Returns the standard error of the mean return, over members if any, else episodes."""
        samples = self.mean_return() if self.returns.ndim > 1 else self.returns
        return float(np.std(samples, ddof=min(1, samples.size - 1)) / np.sqrt(samples.size))


class Evaluation(NamedTuple):
    """What parameters reach, acting as the agent does in evaluation, and greedily beside it."""

    episodes: Episodes
    greedy: Episodes | None  # None where the former are greedy, or these are not wanted

    @property
    def score(self) -> float:
        """The mean return over all episodes and members: what checkpoints are ranked by."""
        return float(np.mean(self.episodes.returns))

    def by_prefix(self) -> dict[str, Episodes]:
        """Returns both by what the names of their metrics begin with."""
        return {"": self.episodes} | ({} if self.greedy is None else {"greedy_": self.greedy})


class Stopped(Exception):
    """An evaluation was given up on, because nobody wants its result any more."""


class _Carry(NamedTuple):
    state: Any
    timestep: types.TimeStep
    actor_state: Any
    episodes: Episodes
    time: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluator:
    """Plays `E` episodes at once.

    Attributes:
      agent: who acts.
      environment: a one-stream JAX environment, without auto-reset.
      num_episodes: `E`. Episodes are played side by side, so that many of them cost little.
      population: `P`; with more than one, parameters have a leading axis.
      max_steps: where an episode is cut; None for the environment's own limit.
    """

    agent: agent_lib.Agent
    environment: environment_lib.Environment
    num_episodes: int = 512
    population: int = 1
    max_steps: int | None = None

    def __post_init__(self):
        if self.num_episodes < 1:
            raise errors.UserError(f"an evaluation of {self.num_episodes} episodes: expected >= 1")

    def run(
        self,
        params: types.PyTree,
        key: jax.Array,
        stop: Callable[[], bool] = lambda: False,
    ) -> Episodes:
        """Returns what the policy reaches; the same key gives the same episodes.

        It is one program, on the first device that holds the parameters, and does not listen to
        `stop`.
        """
        params = jax.tree.map(first_shard, params)
        return Episodes(*jax.device_get(self._run(params, jax.device_put(key, device(params)))))

    @property
    def limit(self) -> int:
        """Agent steps after which an episode is cut."""
        return self.max_steps or self.environment.spec.max_episode_steps or DEFAULT_MAX_STEPS

    @functools.cached_property
    def _run(self):
        run = self._run_member
        if self.population > 1:
            run = jax.vmap(run, in_axes=(0, None))
        return jax.jit(run)

    def _run_member(self, params: types.PyTree, key: jax.Array) -> Episodes:
        count = self.num_episodes
        env_id = jnp.arange(count, dtype=jnp.int32)
        reset_keys, act_keys = jax.vmap(episode_keys, (None, 0))(key, env_id)  # [E]
        state, timestep = jax.vmap(self.environment.reset)(reset_keys)
        start = _Carry(
            state=state,
            timestep=timestep,
            actor_state=self.agent.init_actor(env_id, count, True),
            episodes=Episodes(
                jnp.zeros((count,)), jnp.zeros((count,), jnp.int32), jnp.zeros((count,), bool)
            ),
            time=jnp.zeros((), jnp.int32),
        )

        def unfinished(carry: _Carry) -> jax.Array:
            return (carry.time < self.limit) & ~jnp.all(carry.episodes.finished)

        def step(carry: _Carry) -> _Carry:
            step_keys = jax.vmap(jax.random.fold_in, (0, None))(act_keys, carry.time)
            action, actor_state, _ = self.agent.act(
                params, carry.actor_state, carry.timestep, step_keys, evaluation=True
            )
            state, timestep = jax.vmap(self.environment.step)(carry.state, action)
            running = ~carry.episodes.finished
            episodes = Episodes(
                carry.episodes.returns + jnp.where(running, timestep.reward, 0.0),
                carry.episodes.lengths + running.astype(jnp.int32),
                carry.episodes.finished | timestep.last(),
            )
            return _Carry(state, timestep, actor_state, episodes, carry.time + 1)

        return jax.lax.while_loop(unfinished, step, start).episodes


def run_key(seed: int, update: int | None = None) -> jax.Array:
    """Returns the key of a run's evaluation, apart from all keys of training.

    The final evaluation of a run has the same key as `scripts/evaluate.py`, whichever checkpoint it
    evaluates: checkpoints are compared on the same episodes. Evaluations during training have
    others, so that the points of a learning curve have independent errors, and so that the best
    checkpoint, which they choose, is judged on episodes that did not choose it.

    Args:
      seed: of the run.
      update: after how many updates the run is evaluated; None for its final evaluation.
    """
    key = jax.random.fold_in(jax.random.key(seed), _SALT)
    if update is None:
        return jax.random.fold_in(key, _FINAL)
    return jax.random.fold_in(jax.random.fold_in(key, _PERIODIC), update)


def episode_keys(key: jax.Array, episode: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Returns the key of an episode's reset, and the one that acting's are folded from by time."""
    acting = jax.random.fold_in(key, _ACTING)
    return jax.random.fold_in(key, episode), jax.random.fold_in(acting, episode)


def first_shard(leaf: Any) -> Any:
    """Returns the copy of a replicated array that lies on its first device."""
    if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
        return leaf.addressable_data(0)
    return leaf


def device(params: types.PyTree) -> jax.Device | None:
    """Returns the device of parameters that lie on one; None where there are none."""
    arrays = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
    return next(iter(arrays[0].devices())) if arrays else None


def record(
    agent: agent_lib.Agent,
    environment: environment_lib.Environment,
    params: types.PyTree,
    key: jax.Array,
    max_steps: int | None = None,
) -> list[Any]:
    """Plays one episode and returns the environment's states, one a step, for rendering.

    Args:
      agent: who acts.
      environment: what it acts in.
      params: of one member.
      key: of the episode: that of `Evaluator.run` gives the first of its episodes.
      max_steps: where to stop; None for the environment's own limit.
    """
    evaluator = Evaluator(agent, environment, 1, max_steps=max_steps)
    reset_key, act_key = episode_keys(key, 0)
    state, timestep = jax.jit(environment.reset)(reset_key)
    actor_state = agent.init_actor(jnp.zeros((1,), jnp.int32), 1, True)

    @jax.jit
    def step(state, timestep, actor_state, time):
        step_key = jax.random.fold_in(act_key, time)[None]
        row = jax.tree.map(lambda x: x[None], timestep)
        action, actor_state, _ = agent.act(params, actor_state, row, step_key, evaluation=True)
        state, timestep = environment.step(state, jax.tree.map(lambda x: x[0], action))
        return state, timestep, actor_state

    states = [jax.device_get(state)]
    for time in range(evaluator.limit):
        state, timestep, actor_state = step(state, timestep, actor_state, time)
        states.append(jax.device_get(state))
        if timestep.last():
            break
    return states


@dataclasses.dataclass(frozen=True, eq=False)
class UniformPolicy:
    """Acts uniformly at random among the legal actions: what every return is measured against.

    It has the acting half of `podracers.agent.Agent` only.
    """

    spec: environment_lib.EnvironmentSpec

    def init_actor(self, env_id: jax.Array, num_envs: int, evaluation: bool = False) -> tuple[()]:
        """Remembers nothing."""
        return ()

    def act(self, params, actor_state, timestep, key, evaluation=False):
        """Samples a legal action for each stream."""
        action = jax.vmap(
            lambda observation, key: check.random_action(self.spec.action, observation, key)
        )(timestep.observation, key)
        return action, (), ()
