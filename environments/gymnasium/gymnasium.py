"""Adaptor of Gymnasium: all registered environments, on the host.

Towers et al., "Gymnasium: A Standard Interface for Reinforcement Learning Environments",
https://arxiv.org/abs/2407.17032.

Axis legend: `B` streams.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import jax
import numpy as np
from gymnasium.envs import registration

from environments import adaptors, episode_metrics
from environments.gymnasium import async_vector, spaces, sync_vector
from podracers import environment, errors, types, video

_LOGGER = logging.getLogger(__name__)
_MAKE_OPTIONS = ("max_episode_steps", "disable_env_checker", "render_mode")
# Wrappers, also of vectors, that keep statistics, and the options of agents in their place.
_STATISTICS = {
    "NormalizeObservation": "normalize_observations",
    "NormalizeReward": "normalize_rewards",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Gymnasium:
    """A factory of batches of a registered Gymnasium environment.

    `environments.gymnasium.spaces` defines observations and actions. `terminated` takes precedence
    over `truncated`. Results are compared with the spaces; Gymnasium's own checks of every
    step are off unless `options` has `disable_env_checker: False`.

    Attributes:
      env_id: registered id, such as `CartPole-v1`; `my_package.games:Chess-v0` imports
        `my_package.games` first, which registers it.
      options: arguments of `gymnasium.make`: of the environment, and `max_episode_steps`.
      vectorization: `sync` steps the environments one after the other in the calling thread;
        `async` steps them in worker processes, one for each thread that `make` may use, while the
        caller continues. Episodes are equal.
      wrappers: callables, from the inside out, that take an environment, or their names, such as
        `gymnasium.wrappers:FlattenObservation`. Those that keep statistics are refused, in a
        registered environment as well; a warning names those that change rewards.
      metrics: entries of `info` to report for each episode (rule S6), with a reduction over its
        steps: "last", "max", "mean" or "sum", such as `{'success': 'max'}`. Steps without an entry
        are skipped; an entry that no step of an episode has is 0.
    """

    env_id: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    vectorization: str = "sync"
    wrappers: Sequence[str | Callable[[Any], Any]] = ()
    metrics: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        errors.require_types(self)
        episode_metrics.check("Gymnasium.metrics", self.metrics)
        known = ("sync", "async")
        errors.require_known("Gymnasium.vectorization: got", self.vectorization, known)

    @functools.cached_property
    def spec(self) -> environment.EnvironmentSpec:
        """The shapes of one environment, which is constructed temporarily."""
        name = self._factory.spec.id
        for wrapper in self._factory.wrappers:  # wrappers of vectors cannot be made
            _refuse_statistics(name, wrapper)
        with self._temporary_env() as env:
            layer = env
            while isinstance(layer, gymnasium.Wrapper):
                _refuse_statistics(name, type(layer))
                if isinstance(layer, gymnasium.RewardWrapper):
                    _LOGGER.warning(
                        "%s: the wrapper %s changes rewards, and with them the unit of all "
                        "reported returns",
                        name,
                        errors.path_of(type(layer)),
                    )
                layer = layer.env
            if "seed" not in _arguments(env.unwrapped.reset, ["seed"]):
                raise errors.UserError(
                    f"{name}: expected reset(*, seed=None, options=None), got one without 'seed'"
                )
            limit = env.spec.max_episode_steps if env.spec is not None else None
            return environment.EnvironmentSpec(
                name,
                adaptors.channels_last_spec(spaces.observation_spec(env.observation_space, name)),
                spaces.action_spec(env.action_space, name),
                limit,
                metrics=tuple(self.metrics),
            )

    def make(
        self, key: jax.Array, env_id: np.ndarray, num_threads: int
    ) -> environment.HostEnvironment:
        """Makes `B` environments (see `environment.HostEnvironmentFactory`)."""
        _ = self.spec  # raises here, in this process, for environments that cannot be made
        seeds, numbers = environment.stream_seeds(key, env_id).tolist(), env_id.tolist()
        if self.vectorization == "async":
            vector = async_vector.AsyncVector(self._factory, seeds, numbers, num_threads)
        else:
            vector = sync_vector.SyncVector(self._factory, seeds, numbers)
        return _HostEnvironment(vector, len(seeds))

    @property
    def render(self) -> Callable[[types.TimeStep], np.ndarray]:
        """Draws a time step; the attribute is absent unless the observation is an image."""
        return adaptors.image_of(self.spec)

    def filmed(self) -> "Gymnasium":
        """Returns this factory with rendered environments, in this process.

        Raises:
          errors.UserError: they cannot render pictures, or a package is missing.
        """
        with self._temporary_env() as env:
            if "rgb_array" not in (env.metadata.get("render_modes") or ()):
                raise errors.UserError(
                    f"{self.spec.name} has no render mode 'rgb_array', which a video needs"
                )
        options = {**self.options, "render_mode": "rgb_array"}
        factory = dataclasses.replace(self, options=options, vectorization="sync")
        # Many render with pygame, whose SDL prints errors without a sound card.
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
        with factory._temporary_env() as env:
            try:  # missing libraries are often detected only at the first picture
                env.reset(seed=0)
                video.picture(self, env.render())
            except Exception as error:
                raise errors.UserError(
                    f"Gymnasium's {self.spec.name} cannot be drawn: {errors.first_line(error)}"
                ) from error
        return factory

    @functools.cached_property
    def _factory(self) -> sync_vector.EnvFactory:
        wrappers = [_wrapper(one) if isinstance(one, str) else one for one in self.wrappers]
        options, metrics = dict(self.options), dict(self.metrics)
        return sync_vector.EnvFactory(_registered(self.env_id), options, wrappers, metrics)

    @contextlib.contextmanager
    def _temporary_env(self) -> Iterator[Any]:
        """Makes one environment, and closes it.

        Raises:
          errors.UserError: the options are wrong, or a package is missing.
          errors.RunFailure: it cannot be closed.
        """
        factory = self._factory
        name = f"Gymnasium's {factory.spec.id}"
        try:
            vector = sync_vector.SyncVector(factory, [0], [0])
        except (gymnasium.error.Error, ImportError, OSError) as error:
            raise errors.UserError(f"{name}: {errors.first_line(error)}") from error
        except TypeError as error:
            creator = factory.spec.entry_point
            if isinstance(creator, str):
                creator = registration.load_env_creator(creator)
            known = {*_arguments(creator, self.options), *_MAKE_OPTIONS}
            with adaptors.options_of(name, self.options, known):
                raise error
        with contextlib.closing(vector):
            yield vector.envs[0]


class _HostEnvironment:
    """The contract's time steps (see `environment.HostEnvironment`)."""

    def __init__(self, vector: sync_vector.SyncVector | async_vector.AsyncVector, num_envs: int):
        self._vector = vector
        self.num_envs = num_envs

    def reset(self) -> types.TimeStep[np.ndarray]:
        return adaptors.channels_last(types.TimeStep(*self._vector.reset()))

    def send(self, action: np.ndarray) -> None:
        self._vector.send(np.asarray(action))

    def recv(self) -> types.TimeStep[np.ndarray]:
        return adaptors.channels_last(types.TimeStep(*self._vector.recv()))

    def render(self) -> list[np.ndarray]:
        """Returns a picture of each environment of a `filmed` factory."""
        assert isinstance(self._vector, sync_vector.SyncVector)  # `filmed` chooses it
        return self._vector.render()

    def close(self) -> None:
        self._vector.close()


def _registered(env_id: str) -> Any:
    """Returns Gymnasium's spec of an id, after importing the module before a colon."""
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise errors.UserError(f"environment '{env_id}': {error}") from error
    if name not in gymnasium.registry:
        near = errors.nearest(name, gymnasium.registry)
        hint = "" if module else " (one of your own: 'module:Name-v0' imports the module first)"
        raise errors.UserError(f"Gymnasium has no environment '{name}'{near}{hint}")
    return gymnasium.registry[name]


def _wrapper(name: str) -> Callable[[Any], Any]:
    """Returns the wrapper that `module:attribute` names."""
    try:
        wrapper = pkgutil.resolve_name(name)
        if not callable(wrapper):
            raise ValueError("not a wrapper")
        return wrapper
    except (ValueError, ImportError, AttributeError) as error:
        is_attribute = isinstance(error, AttributeError)
        near = errors.nearest(error.name or "", dir(error.obj)) if is_attribute else ""
        raise errors.UserError(
            f"Gymnasium.wrappers: expected 'module:Wrapper', got '{name}' ({error}){near}"
        ) from error


def _refuse_statistics(name: str, wrapper: Any) -> None:
    """Raises `errors.UserError` for a class of wrappers in `_STATISTICS`, or a subclass."""
    for kind in getattr(wrapper, "__mro__", ()):
        if option := _STATISTICS.get(kind.__name__):
            raise errors.UserError(
                f"{name}: the wrapper {errors.path_of(wrapper)} keeps statistics in each "
                "simulator, which evaluations and resumed runs begin without: use "
                f"{option} of the agent"
            )


def _arguments(function: Callable[..., Any], names: Iterable[str]) -> list[str]:
    """Returns the names of a function's arguments; with `names`, if it accepts any."""
    parameters = inspect.signature(function).parameters.values()
    accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return [*(parameter.name for parameter in parameters), *(names if accepts_any else ())]
