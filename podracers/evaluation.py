"""Evaluation of a policy on the first episode of each of many environments, by the agent's `act`.

A fixed number of steps would count short episodes more often than long ones.

Axis legend: `P` population (absent where it is 1), `E` episodes, `B` episodes that host
environments play together; in each of these, an episode of `A` agents has `A` rows.
"""

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracers import agent as agent_lib
from podracers import environment as environment_lib
from podracers import errors, keys, parallel, types, unroll, video
from podracers import population as population_lib
from podracers import precision as precision_lib
from podracers.hosts import processes
from podracers.supervision import pipeline

DEFAULT_MAX_STEPS = 10_000  # agent steps, where the environment itself has no limit
MAX_BATCH = 64  # simulators that are alive at the same time
_NUM_EPISODES, _NUM_HOST_EPISODES = 512, 64  # defaults; simulators are slow
_SALT = 0x5EED  # separates the keys of evaluations from the keys of the runner's streams
_PERIODIC, _FINAL = range(2)  # folded into the key of an evaluation, besides the seed

# Folded into the keys of acting: a number that no episode has. Without it, these keys would equal
# keys that the environment splits from its reset key.
_ACTING = 2**31 - 1

Stopped = pipeline.Cancelled  # `stop()` became true before the end of an evaluation


class Episodes(NamedTuple):
    """Returns, lengths and metrics of episodes, on the host."""

    returns: np.ndarray  # [P, E] float32, undiscounted, of the environment's own rewards
    lengths: np.ndarray  # [P, E] int32, agent steps
    finished: np.ndarray  # [P, E] bool; false where the episode outlasted the evaluation
    # [P, E] float32, the environment's own by name; if the episode was cut, the latest ones
    metrics: dict[str, np.ndarray] = {}  # noqa: RUF012  (nothing writes into it)

    def mean_return(self) -> np.ndarray:
        """Returns the mean return of each member, `[P]` or a scalar."""
        return np.mean(self.returns, axis=-1)

    def means(self) -> dict[str, np.ndarray]:
        """Returns the means of return, length and metrics by name (S6), of each member."""
        values = {"return": self.returns, "length": self.lengths, **self.metrics}
        present = {name: np.ma.masked_array(x, np.isnan(x)) for name, x in values.items()}
        return {name: np.ma.filled(x.mean(axis=-1), np.nan) for name, x in present.items()}

    def standard_error(self) -> float:
        """Returns the standard error of the mean return, over members if any, else episodes."""
        samples = self.mean_return() if self.returns.ndim > 1 else self.returns
        return float(np.std(samples, ddof=min(1, samples.size - 1)) / np.sqrt(samples.size))

    def after(self, timestep: types.TimeStep[Any], xp: Any = np) -> "Episodes":
        """Returns the episodes after another time step `[E]`, which finished ones ignore.

        `xp` is `numpy` or `jax.numpy`, the kind of all arrays.
        """
        running = ~self.finished
        return Episodes(
            self.returns + xp.where(running, timestep.reward, 0.0),
            self.lengths + running.astype(np.int32),
            self.finished | timestep.last(),
            {
                name: xp.where(running, timestep.metrics[name], value)
                for name, value in self.metrics.items()
            },
        )


class Evaluation(NamedTuple):
    """Episodes of the agent's evaluation policy, and of its greedy policy."""

    episodes: Episodes
    greedy: Episodes | None = None  # None if `episodes` are greedy, or none were requested

    @property
    def score(self) -> float:
        """The mean return over all episodes and members, by which checkpoints are ranked."""
        return float(np.mean(self.episodes.returns))

    @property
    def num_steps(self) -> int:
        """Agent steps of all episodes."""
        return sum(int(np.sum(episodes.lengths)) for episodes in self.by_prefix().values())

    def by_prefix(self) -> dict[str, Episodes]:
        """Returns both by the prefix of the names of their metrics."""
        return {"": self.episodes} | ({} if self.greedy is None else {"greedy_": self.greedy})

    def summary(self, seeds: Sequence[int]) -> dict[str, Any]:
        """Returns numbers for JSON; `seeds` are those of a population's members, or empty."""
        numbers: dict[str, Any] = {}
        for prefix, episodes in self.by_prefix().items():
            numbers |= {
                f"{prefix}return": float(np.mean(episodes.returns)),
                f"{prefix}standard_error": episodes.standard_error(),
                f"{prefix}length": float(np.mean(episodes.lengths)),
                f"{prefix}episodes": episodes.returns.size,
                f"{prefix}unfinished": int(np.sum(~episodes.finished)),
            }
            if seeds:
                pairs = zip(map(str, seeds), episodes.mean_return().tolist())
                numbers[f"{prefix}return_by_seed"] = dict(pairs)
            present = {name: x[~np.isnan(x)] for name, x in episodes.metrics.items()}  # see S6
            if means := {name: float(np.mean(x)) for name, x in present.items() if x.size}:
                numbers[f"{prefix}metrics"] = means
        return numbers


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluator:
    """Plays `E` episodes, in a JAX environment all at once, on the host a batch at a time.

    All programs run on the first device that holds the parameters. A population plays in JAX only,
    and its parameters have a leading axis `[P]`.
    """

    agent: agent_lib.Policy
    environment: environment_lib.AnyEnvironment
    num_episodes: int | None = None  # None for 512 in a JAX environment, or 64 on the host
    population: int = 1  # `P`
    population_values: population_lib.Values = dataclasses.field(default_factory=dict)
    max_steps: int | None = None  # agent steps until an episode is cut; None for its own limit
    timeout: float | None = 60.0  # seconds that a simulator's step may take; None without one
    precision: precision_lib.Precision = precision_lib.DEFAULT

    def __post_init__(self):
        errors.require_count(self, "num_episodes")

    @property
    def count(self) -> int:
        """Number of episodes, `E`."""
        if self.num_episodes is not None:
            return self.num_episodes
        return _NUM_HOST_EPISODES if environment_lib.is_host(self.environment) else _NUM_EPISODES

    @property
    def limit(self) -> int:
        """Agent steps after which an episode is cut."""
        return self.max_steps or self.environment.spec.max_episode_steps or DEFAULT_MAX_STEPS

    def member(self, params: types.PyTree, index: int) -> tuple["Evaluator", types.PyTree]:
        """Returns the evaluator and the parameters of one member of the population."""
        params, values = population_lib.split(params, self.population_values)
        agent = population_lib.member(self.agent, values, index)
        alone = dataclasses.replace(self, agent=agent, population=1, population_values={})
        return alone, jax.tree.map(lambda x: x[index], params)

    def run(
        self,
        params: types.PyTree,
        key: jax.Array,
        stop: Callable[[], bool] = lambda: False,
        share: tuple[int, int] = (0, 1),
    ) -> Episodes:
        """Returns the policy's episodes; the same key gives the same episodes.

        Args:
          params: the agent's acting parameters, `[P, ...]`.
          key: one typed key, of the evaluation.
          stop: called at every step on the host, returns true to cancel the evaluation; the one
            program of a JAX environment cannot be cancelled.
          share: `(index, count)`: plays the part `index` of `count` equal parts of the episodes.

        Raises:
          Stopped: `stop()` was true before the end.
          pipeline.WorkerError: a simulator hangs.
        """
        env_id = self._episodes_of(share)
        if not env_id.size:
            return self._unplayed((self.population, 0) if self.population > 1 else (0,))
        if not environment_lib.is_host(self.environment):
            return jax.device_get(self._run(_on_one_device(params), key, env_id))
        # Batches of one size, so that acting compiles once; surplus episodes are dropped.
        size = -(-env_id.size // -(-env_id.size // MAX_BATCH))

        def play(worker: pipeline.Worker) -> Episodes:
            batches = []
            for start in range(0, env_id.size, size):
                batch = np.arange(size, dtype=np.int32) + env_id[start]
                rows = size * self.environment.spec.num_agents
                episodes = self._unplayed((rows,))._replace(returns=np.zeros(rows, np.float64))
                with contextlib.closing(self._steps(params, key, batch, worker)) as steps:
                    next(steps)
                    for _, timestep in steps:
                        episodes = episodes.after(timestep)
                        if np.all(episodes.finished[: (env_id.size - start) * rows // size]):
                            break
                batches.append(episodes._replace(returns=episodes.returns.astype(np.float32)))
            count = env_id.size * self.environment.spec.num_agents
            return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:count], *batches)

        return pipeline.call("evaluation", play, self.timeout, stop)

    def lower(self, params: types.PyTree) -> jax.stages.Lowered | None:
        """Returns the program of `run` for parameters of these `shapes`, to compile it ahead.

        It plays this process's share of episodes. There is none for a host environment.
        """
        env_id = self._episodes_of((processes.index(), processes.count()))
        if not env_id.size or environment_lib.is_host(self.environment):
            return None
        return self._run.lower(params, jax.eval_shape(lambda: run_key(0)), env_id)

    def _episodes_of(self, share: tuple[int, int]) -> np.ndarray:
        """Returns the numbers of the episodes of a share, int32."""
        index, count = share
        first, end = (self.count * part // count for part in (index, index + 1))
        return np.arange(first, end, dtype=np.int32)

    def film(self, params: types.PyTree, key: jax.Array) -> list[np.ndarray]:
        """Returns frames of the first episode of `run`, uint8 `[height, width, 3]`.

        The first member of a population plays it.

        Raises:
          errors.UserError: the environment cannot be rendered.
        """
        if self.population > 1:
            alone, params = self.member(params, 0)
            return alone.film(params, key)
        environment = video.drawable(self.environment)
        if environment_lib.is_host(environment):
            play = functools.partial(self._film_on_host, environment, params, key)
            return pipeline.call("recording", play, self.timeout)
        params = _on_one_device(params)
        reset_keys, act_keys, actor_state = self._jitted_begin(key, np.zeros(1, np.int32))
        state, timestep = jax.jit(functools.partial(_reset, environment))(reset_keys)
        step = jax.jit(functools.partial(_step, environment))
        frames = [video.draw(environment, _first_row(state))]
        for time in range(self.limit):
            action, actor_state = self._jitted_act(params, actor_state, timestep, act_keys, time)
            state, timestep = step(state, action)
            frames.append(video.draw(environment, _first_row(state)))
            if timestep.last()[0]:
                break
        return frames

    def _begin(self, key: jax.Array, env_id: jax.Array):
        """Returns the keys of reset and of acting `[B]`, and the actor state of some episodes."""
        spec = self.environment.spec
        keys_of = jax.vmap(episode_keys, (None, 0))
        reset_keys, act_keys = keys_of(key, env_id)
        if spec.num_agents > 1:
            env_id = spec.streams_of(env_id)
            _, act_keys = keys_of(key, env_id)
        return (
            reset_keys,
            act_keys,
            self.agent.init_actor(env_id, self.count * spec.num_agents, True),
        )

    def _act(self, params, actor_state, timestep, act_keys, time):
        """Returns the actions `[B]` of one step, and the actor state after it."""
        timestep = timestep._replace(metrics={})
        with self.precision.tracing():
            action, actor_state, _ = self.agent.act(
                params, actor_state, timestep, keys.at_time(act_keys, time), evaluation=True
            )
        return action, actor_state

    # Compiled once for all batches of one size.
    _jitted_begin = functools.cached_property(lambda self: jax.jit(self._begin))
    _jitted_act = functools.cached_property(lambda self: jax.jit(self._act))

    def _unplayed(self, shape: tuple[int, ...], xp: Any = np) -> Episodes:
        """Returns episodes without steps, in arrays of `xp`, NumPy or its namesake of JAX."""

        def zeros(dtype: Any = np.float32) -> np.ndarray:
            return xp.zeros(shape, dtype)

        metrics = {name: zeros() for name in self.environment.spec.metrics}
        return Episodes(zeros(), zeros(np.int32), zeros(np.bool_), metrics)

    @functools.cached_property
    def _run(self):
        """One program that evaluates all members in a JAX environment."""
        if self.population == 1:
            return jax.jit(self._run_member)

        def member(params, values, key, env_id):
            agent = population_lib.with_options(self.agent, values)
            return dataclasses.replace(self, agent=agent)._run_member(params, key, env_id)

        def run(params, key, env_id):
            values = population_lib.arrays(self.population_values)
            params, values = population_lib.split(params, values)
            return jax.vmap(member, in_axes=(0, 0, None, None))(params, values, key, env_id)

        return jax.jit(run)

    def _run_member(self, params: types.PyTree, key: jax.Array, env_id: jax.Array) -> Episodes:
        environment = self.environment
        assert not environment_lib.is_host(environment)
        reset_keys, act_keys, actor_state = self._begin(key, env_id)
        state, timestep = _reset(environment, reset_keys)
        episodes = self._unplayed(act_keys.shape, jnp)

        def unfinished(carry) -> jax.Array:
            time, *_, episodes = carry
            return (time < self.limit) & ~jnp.all(episodes.finished)

        def step(carry):
            time, state, timestep, actor_state, episodes = carry
            action, actor_state = self._act(params, actor_state, timestep, act_keys, time)
            state, timestep = _step(environment, state, action)
            return time + 1, state, timestep, actor_state, episodes.after(timestep, jnp)

        start = (jnp.zeros((), jnp.int32), state, timestep, actor_state, episodes)
        return jax.lax.while_loop(unfinished, step, start)[-1]

    def _film_on_host(self, environment, params, key, worker) -> list[np.ndarray]:
        frames, env_id = [], np.zeros(1, np.int32)
        evaluator = dataclasses.replace(self, environment=environment)
        with contextlib.closing(evaluator._steps(params, key, env_id, worker)) as steps:
            for host, timestep in steps:
                if hasattr(environment, "render"):
                    frames.append(video.draw(environment, _first_row(timestep)))
                else:
                    frames.append(video.picture(environment, host.render()[0]))
                if timestep.last()[0]:
                    break
        return frames

    def _steps(
        self, params: types.PyTree, key: jax.Array, env_id: np.ndarray, worker: pipeline.Worker
    ) -> Generator[tuple[Any, types.TimeStep[np.ndarray]]]:
        """Yields a `HostEnvironment` of some episodes, with each time step `[B, ...]` to the limit.

        The caller must close the generator, which closes the environments. `env_id` `[B]` has the
        indices of the episodes, and `worker` is the thread that steps them.
        """
        assert environment_lib.is_host(self.environment)
        params = _on_one_device(params)
        with worker.doing(pipeline.COMPILING):
            _, act_keys, actor_state = self._jitted_begin(key, env_id)
        with worker.doing(pipeline.STARTING):
            host = self.environment.make(key, env_id, parallel.num_host_cores())
        try:
            with worker.doing(pipeline.STARTING):
                timestep = host.reset()
            expected = self.environment.spec.timesteps(len(act_keys))
            faults = environment_lib.structure_faults("reset", timestep, expected)
            environment_lib.refuse(self.environment, faults)
            yield host, timestep
            for time in range(self.limit):
                with worker.doing("inference" if time else pipeline.COMPILING):
                    action, actor_state = self._jitted_act(
                        params, actor_state, timestep, act_keys, np.int32(time)
                    )
                    action = np.asarray(jax.device_get(action))
                with worker.doing("environment step" if time else pipeline.STARTING):
                    host.send(action)
                    timestep = host.recv()
                yield host, timestep
        finally:
            pipeline.close_environments(host)


def play_together(
    play: Callable[[tuple[int, int]], Iterable[Episodes | None]],
) -> list[Episodes] | None:
    """Plays a share of an evaluation in each of several processes; all of them call it.

    `play` returns sets of the episodes of a share (see `Evaluator.run`), of which None is left out.
    Process 0 gets the complete sets, the others None; so do all if a signal stopped any process.
    """
    file, played, share = io.BytesIO(), [], (processes.index(), processes.count())
    with contextlib.suppress(Stopped):  # leaves the message empty
        played = [episodes for episodes in play(share) if episodes is not None]
        np.savez(file, *jax.tree.leaves(played))
    messages = processes.gather(file.getvalue())
    if not messages or not all(messages):
        return None
    # No pickle: any program that reaches the port may have sent it.
    parts = [np.load(io.BytesIO(message), allow_pickle=False).values() for message in messages]
    leaves = [np.concatenate(leaf, axis=-1) for leaf in zip(*parts, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(played), leaves)


def run_key(seed: int, update: int | None = None) -> jax.Array:
    """Returns the key of a run's evaluation after some updates, which no training stream uses.

    `update` is None for the final evaluation and for `podracers-evaluate`, which thus measure the
    best checkpoint on episodes that did not select it.
    """
    key = jax.random.fold_in(jax.random.key(seed), _SALT)
    if update is None:
        return jax.random.fold_in(key, _FINAL)
    return jax.random.fold_in(jax.random.fold_in(key, _PERIODIC), update)


def episode_keys(key: jax.Array, episode: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Returns the key of an episode's reset, and the key into which acting folds the time."""
    acting = jax.random.fold_in(key, _ACTING)
    return jax.random.fold_in(key, episode), jax.random.fold_in(acting, episode)


def _reset(environment: environment_lib.Environment, key: jax.Array):
    """Returns the states and the time steps of new episodes, from their keys."""
    state, timestep = jax.vmap(environment.reset)(key)
    return state, unroll.to_streams(environment.spec, timestep)


def _step(environment: environment_lib.Environment, state: Any, action: types.PyTree):
    """Returns the states and the time steps after actions `[B, ...]`."""
    action = unroll.to_agents(environment.spec, action)
    state, timestep = jax.vmap(environment.step)(state, action)
    return state, unroll.to_streams(environment.spec, timestep)


def shapes(params: types.PyTree) -> types.PyTree:
    """Returns the shapes of arrays, on the device where `Evaluator.run` has them; else numbers."""

    def shape(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    return jax.tree.map(shape, _on_one_device(params))


def _on_one_device(params: types.PyTree) -> types.PyTree:
    """Returns the first copy of replicated parameters."""
    return jax.tree.map(lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x, params)


@dataclasses.dataclass(frozen=True, eq=False)
class UniformPolicy:
    """Uniform policy over legal actions."""

    spec: environment_lib.EnvironmentSpec

    def init_actor(self, env_id: jax.Array, num_envs: int, evaluation: bool = False) -> tuple[()]:
        return ()

    def act(self, params, actor_state, timestep, key, evaluation=False):
        draw = jax.vmap(functools.partial(environment_lib.random_action, self.spec.action))
        return draw(timestep.observation, key), (), ()


def _first_row(tree: types.PyTree) -> types.PyTree:
    """Returns the first row of each array, on the host."""
    return jax.tree.map(lambda x: x[0, ...], jax.device_get(tree))
