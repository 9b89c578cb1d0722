"""Adaptor of Jumanji: every registered environment.

Jumanji (Bonnet et al., "Jumanji: a Diverse Suite of Scalable Reinforcement Learning Environments in
JAX", https://arxiv.org/abs/2306.09884) is imported lazily: its import initialises a JAX backend.
"""

import builtins
import contextlib
import dataclasses
import functools
import importlib
import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from environments import adaptors
from podracers import environment, errors, types

# Environments of several agents by the beginning of their ids, with the parts of observations that
# have an axis of agents, beside the mask.
_AGENT_PARTS = {
    "Connector": (),
    "RobotWarehouse": ("agents_view",),
    "LevelBasedForaging": ("agents_view",),
}
_FRAME_INCHES = (4.0, 4.0)  # 400 x 400 pixels, by matplotlib's 100 dots per inch


@dataclasses.dataclass(frozen=True, eq=False)
class Jumanji(adaptors.Adaptor):
    """A registered Jumanji environment under the contract.

    - Observations are nested dicts with Jumanji's dtypes; 64-bit floats become 32-bit floats.
    - A multi-discrete action whose mask covers the JOINT choice (Tetris, BinPack, Minesweeper,
      Sudoku, FlatPack) becomes one flat discrete action; others keep one integer per part.
    - Rewards per agent are summed over the agents. An agent without a legal action may take any.
    - With `agents`, Connector, RobotWarehouse and LevelBasedForaging are environments of several
      agents, with a reward each (RobotWarehouse has one of all). In the grid of Connector an agent
      sees itself as the first; a blocked one pays for each step until the episode ends.
    - The episode terminated iff Jumanji ends it with discount 0 for every agent.

    Most tasks report their `time_limit` as a termination (Connector and LevelBasedForaging do not).
    The inner clock is set one step late, and this class ends the episode at the limit: LAST with
    discount 1, unless the task ends by its own rules on the same step.

    Attributes:
      name: registered id, such as `Snake-v1`.
      options: keyword arguments of the environment's constructor. A `generator` may be named, from
        Jumanji's module of the task: `{"RandomGenerator": {"num_rows": 6, ...}}`.
      agents: whether each agent is a stream with its own action, not all of them one.
    """

    name: str = "Snake-v1"
    agents: bool = False

    @functools.cached_property
    def spec(self) -> environment.EnvironmentSpec:
        inner, limit = self._built
        with jax.ensure_compile_time_eval():
            observation = _observation_spec(inner.observation_spec)
        if self._mask is not None:
            shape = environment.legal_values(self._actions.spec).shape
            mask = specs.BoundedArray(shape, bool, False, True, environment.ACTION_MASK)
            observation[environment.ACTION_MASK] = mask
        action = self._actions.spec
        if not self.agents:
            return environment.EnvironmentSpec(self.name, observation, action, limit)
        for key in (*self._agent_parts, environment.ACTION_MASK):
            part = observation[key]
            observation[key] = specs.Array(part.shape[1:], part.dtype, key)
        single = specs.DiscreteArray(int(action.maximum[0]) + 1, name="action")
        return environment.EnvironmentSpec(
            self.name, observation, single, limit, num_agents=len(action.maximum)
        )

    def reset(self, key: jax.Array) -> tuple[adaptors.CountedState, types.TimeStep]:
        # Some of Jumanji's generators accept raw keys only, and its states store them.
        inner, timestep = self._built[0].reset(jax.random.key_data(key))
        state = adaptors.CountedState(adaptors.strong(inner), jnp.zeros((), jnp.int32))
        restart = jax.vmap(types.restart) if self.agents else types.restart
        return state, restart(self._observe(timestep.observation))

    def step(
        self, state: adaptors.CountedState, action: jax.Array
    ) -> tuple[adaptors.CountedState, types.TimeStep]:
        game, limit = self._built
        # Some environments assign to their argument: pass a copy of the tree.
        inner = jax.tree.map(lambda leaf: leaf, state.inner)
        inner, timestep = game.step(inner, self._actions.decode(action, jnp))
        steps = state.steps + 1
        last = timestep.step_type == types.LAST
        terminated = last & jnp.all(timestep.discount == 0.0)
        truncated = last & ~terminated
        if limit is not None:
            truncated |= steps >= limit
        reward = jnp.asarray(timestep.reward, jnp.float32)
        observation = self._observe(timestep.observation)
        following = adaptors.CountedState(adaptors.strong(inner), steps)
        if not self.agents:
            return following, types.transition(observation, jnp.sum(reward), terminated, truncated)
        axis = self.spec.agent_axis
        reward, terminated, truncated = jax.tree.map(
            lambda x: jnp.broadcast_to(x, axis), (reward, terminated, truncated)
        )
        return following, jax.vmap(types.transition)(observation, reward, terminated, truncated)

    def render(self, state: adaptors.CountedState) -> np.ndarray:
        """Returns a picture of one state, uint8 `[height, width, 3]`, by Jumanji's viewer."""
        game = self._built[0]
        viewers = (getattr(game, name, None) for name in ("_viewer", "_env_viewer", "viewer"))
        viewer = next((v for v in viewers if v is not None), None)
        if viewer is None:
            raise errors.UserError(f"{self.name} has no viewer: it cannot be rendered")
        viewer.figure_size = _FRAME_INCHES
        # Viewers open a window by default; their constructors set this attribute for pictures. Not
        # every environment returns its viewer's picture.
        pictures = []
        viewer._display = lambda *figure: pictures.append(viewer._display_rgb_array(*figure))
        with _agg():
            game.render(jax.tree.map(jnp.asarray, state.inner))
            viewer.close()
        return np.array(pictures[-1][..., :3], np.uint8)

    @functools.cached_property
    def _agent_parts(self) -> tuple[str, ...]:
        """The parts of observations that have an axis of agents, beside the mask."""
        kind = self.name.partition("-")[0]
        if kind not in _AGENT_PARTS:
            raise errors.UserError(
                f"Jumanji.agents: expected False for {self.name}; {', '.join(_AGENT_PARTS)} have "
                "several agents"
            )
        return _AGENT_PARTS[kind]

    def _make(self) -> tuple[Any, int | None]:
        """Returns Jumanji's environment, and its time limit or None."""
        with _outside_ipython():
            import jumanji  # noqa: PLC0415  (initialises a backend)
            from jumanji import registration  # noqa: PLC0415

        name, options = self.name, self.options
        errors.require_known("Jumanji has no environment", name, jumanji.registered_environments())
        constructor = registration.load(registration._REGISTRY[name].entry_point)
        parameters = inspect.signature(constructor).parameters
        with adaptors.options_of(f"Jumanji's {name}", options, parameters):
            if isinstance(generator := options.get("generator"), Mapping):
                module = constructor.__module__.rpartition(".")[0] + ".generator"
                classes = vars(importlib.import_module(module))
                ((kind, arguments),) = generator.items()
                errors.require_known(f"{module} has no class", kind, classes)
                options = {**options, "generator": classes[kind](**arguments)}
            inner: Any = jumanji.make(name, **options)  # Sokoban downloads its levels
            if options:  # some are used, and fail, at the first step
                key, action = jax.random.key(0), inner.action_spec.generate_value()
                first = jax.random.key_data(key)
                jax.eval_shape(lambda key: inner.step(inner.reset(key)[0], action), first)
        limit = getattr(inner, "time_limit", None)
        limit = int(limit) if isinstance(limit, int | np.integer) else None
        if limit is not None:
            inner.time_limit = limit + 1
            reward = getattr(inner, "_reward_fn", None)
            # SearchAndRescue scales rewards by its limit: keep the true one there.
            if reward is not None and "time_limit" in inspect.signature(reward).parameters:
                inner._reward_fn = lambda num_found, step, _: reward(num_found, step, limit)
        return inner, limit

    @functools.cached_property
    def _mask(self) -> Any:
        """Jumanji's specification of the action mask, or None."""
        return _children(self._built[0].observation_spec).get(environment.ACTION_MASK)

    @functools.cached_property
    def _actions(self) -> adaptors.ActionCodec:
        with jax.ensure_compile_time_eval():
            spec, mask = self._built[0].action_spec, self._mask
            mask_shape = None if mask is None else tuple(mask.shape)
            low, high = np.asarray(spec.minimum), np.asarray(spec.maximum)
            return adaptors.action_codec(self.name, spec.shape, spec.dtype, low, high, mask_shape)

    def _observe(self, observation: Any) -> types.PyTree:
        observation = adaptors.plain(observation)
        if self._mask is not None:
            shape = environment.legal_values(self._actions.spec).shape
            mask = jnp.asarray(observation[environment.ACTION_MASK], bool).reshape(shape)
            # Agents of MMST that are done, and walled starts of Maze, have no legal action.
            mask |= ~jnp.any(mask, axis=-1, keepdims=True)
            observation = {**observation, environment.ACTION_MASK: mask}
        if self.agents:
            observation = self._of_agents(observation)
        return jax.tree.map(
            lambda spec, leaf: jnp.asarray(leaf, spec.dtype), self.spec.observation, observation
        )

    def _of_agents(self, observation: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the observations of all agents, `[A, ...]` leaves."""
        mask = observation[environment.ACTION_MASK]
        count, split = len(mask), (*self._agent_parts, environment.ACTION_MASK)
        parts = {
            key: part if key in split else jnp.broadcast_to(part, (count, *jnp.shape(part)))
            for key, part in observation.items()
        }
        if not self._agent_parts:  # Connector: three values for each agent, and 0 for empty cells
            grid, first = parts["grid"], 3 * jnp.arange(count)[:, None, None]
            parts["grid"] = jnp.where(grid > 0, (grid - 1 - first) % (3 * count) + 1, 0)
        return parts


def _children(spec: Any) -> dict[str, Any]:
    """Returns the parts of a nested Jumanji spec, by field; none for an array."""
    from jumanji import specs as jumanji_specs  # noqa: PLC0415

    return {key: part for key, part in vars(spec).items() if isinstance(part, jumanji_specs.Spec)}


def _observation_spec(spec: Any, name: str = "observation") -> types.PyTree:
    """Converts a Jumanji observation spec to nested dicts of NumPy ones."""
    children = _children(spec)
    if children:
        return {key: _observation_spec(child, key) for key, child in children.items()}
    dtype = np.dtype(spec.dtype)
    dtype = np.dtype(np.float32) if dtype == np.float64 else dtype
    # The bounds of scalars are wrong: step counts exceed Snake's bound by one, and the position in
    # TSP starts at -1.
    if spec.shape == () or not hasattr(spec, "minimum"):
        return specs.Array(spec.shape, dtype, name)
    bounds = (np.asarray(bound, dtype) for bound in (spec.minimum, spec.maximum))
    return specs.BoundedArray(spec.shape, dtype, *bounds, name=name)


@contextlib.contextmanager
def _outside_ipython() -> Iterator[None]:
    """Hides IPython from modules that are imported inside.

    In a notebook, importing Jumanji switches matplotlib to `ipympl`, and fails without it.
    """
    marker = vars(builtins).pop("__IPYTHON__", None)
    try:
        yield
    finally:
        if marker is not None:
            vars(builtins)["__IPYTHON__"] = marker


@contextlib.contextmanager
def _agg() -> Iterator[None]:
    """Switches matplotlib to drawing without a window, and restores the caller's backend."""
    import matplotlib  # noqa: PLC0415  (slow to import; only videos need it)
    from matplotlib import pyplot  # noqa: PLC0415

    before = matplotlib.get_backend()
    pyplot.switch_backend("agg")
    try:
        with warnings.catch_warnings():
            # Viewers call `show` on their figure, which this canvas does not support.
            warnings.filterwarnings("ignore", message=".*non-interactive.*")
            yield
    finally:
        pyplot.switch_backend(before)
