"""Options of agents: those that agents share, and bounds that are checked before tracing.

An option's bound stands where the option stands, in a dataclass field:

    gamma: float = options.fraction(0.99)

An agent that inherits the option and states another default keeps the bound. `check`, called from
`__post_init__`, raises an error that names the option.

A variant of an agent is a subclass that adds options and replaces `loss` or `targets`, or binds the
option `optimizer`; see docs/varying_agents.md, `actor_critic.ActorCritic` and `replay.ReplayAgent`.

Some agents have one of these options, with this meaning:

    weight_decay: decoupled weight decay, as a portion of the parameters that each step subtracts,
      times the learning rate.
    entropy_cost: weight of the entropy bonus.
    epsilon: final probability of a random action.
    epsilon_steps: agent steps, over all streams, in which it falls linearly from 1.
    evaluation_epsilon: probability of a random action in evaluation.
    greedy_evaluation: whether evaluations take the most probable action; they sample otherwise, as
      training does.
    target_period: gradient steps between updates of the target parameters.
    target_rate: step size of an update of the target parameters, in `[0, 1]`; 1 copies.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from dm_env import specs

from agents.parts import preprocessing
from podracers import environment, errors

FLOAT32_MAX = float(np.finfo(np.float32).max)  # the largest number on a device
_CHECK = "check"  # key in the metadata of a field: a function of the agent and the field's name


def count(default: int | None, least: int = 1, most: int = errors.INT32_MAX) -> Any:
    """Returns a dataclass field for an int from `least` to `most`."""
    require = functools.partial(errors.require_count, least=least, most=most)
    return dataclasses.field(default=default, metadata={_CHECK: require})


def burn_in(default: int, learnt: int) -> Any:
    """Returns a dataclass field for an int that leaves `learnt` steps of `sequence_length`."""

    def require(agent: Any, name: str) -> None:
        largest = agent.sequence_length - learnt
        expected = f"an int from 0 to sequence_length - {learnt} = {largest}"
        expect(agent, name, 0 <= getattr(agent, name) <= largest, expected)

    return dataclasses.field(default=default, metadata={_CHECK: require})


def number(default: float | None) -> Any:
    """Returns a dataclass field for a number that is finite in float32."""
    return _number_field(default, lambda x: True, "a finite number")


def fraction(default: float | None) -> Any:
    """Returns a dataclass field for a number in `[0, 1]`, or None if annotated so."""
    return _number_field(default, lambda x: 0.0 <= x <= 1.0, "a number in [0, 1]")


def positive(default: float | None, most: float = FLOAT32_MAX) -> Any:
    """Returns a dataclass field for a positive number up to `most`, or None if annotated so."""
    return _number_field(default, lambda x: 0.0 < x <= most, f"a positive number (up to {most:g})")


def non_negative(default: float | None, most: float = FLOAT32_MAX) -> Any:
    """Returns a dataclass field for a number from 0 to `most`, or None if annotated so."""
    return _number_field(default, lambda x: 0.0 <= x <= most, f"0 or more (up to {most:g})")


def _number_field(default: Any, holds: Callable[[Any], bool], expected: str) -> Any:
    def require(agent: Any, name: str) -> None:
        value = getattr(agent, name)
        if value is not None and not isinstance(value, jax.core.Tracer):
            # Compared, not `isfinite`: an int may be larger than every float.
            is_real = isinstance(value, int | float | np.floating | np.integer)
            is_finite = is_real and bool(abs(value) <= FLOAT32_MAX)
            expect(agent, name, is_finite and holds(value), expected)

    return dataclasses.field(default=default, metadata={_CHECK: require})


def check(agent: Any) -> None:
    """Raises a `UserError` for the first option of a dataclass that is out of its bounds."""
    errors.require_types(agent)
    checks = {}
    for base in reversed(type(agent).__mro__):  # the bound of an option whose default is another
        for field in getattr(base, "__dataclass_fields__", {}).values():
            if _CHECK in field.metadata:
                checks[field.name] = field.metadata[_CHECK]
    for name, require in checks.items():
        require(agent, name)


@dataclasses.dataclass(frozen=True, eq=False)
class Optimized:
    """Options of agents that take gradient steps on a loss of preprocessed time steps.

    Attributes:
      spec: environment specification.
      optimizer: replaces the agent's optimizer (Adam unless the agent names another one) of weights
        and its options: a function such as `optax.contrib.muon`, called with `learning_rate=1.0`,
        which returns an optax transformation. None for the agent's own.
      learning_rate: factor of the optimizer's steps.
      anneal_steps: agent steps, over all streams, in which the learning rate falls linearly to 0;
        None for a constant one.
      max_grad_norm: norm to which the gradient of the global batch is scaled down, before the
        optimizer; None for no clipping.
      normalize_observations: whether observations are scaled to mean 0 and variance 1 by running
        statistics, and clipped at 10.
      reward_scale: factor of the rewards of training, and of those that recurrent networks see.
      reward_clip: largest absolute value of scaled rewards; None for no bound.
    """

    spec: environment.EnvironmentSpec
    _: dataclasses.KW_ONLY
    optimizer: Callable[..., optax.GradientTransformation] | None = None
    learning_rate: float = positive(1e-3, most=1e3)
    anneal_steps: float | None = positive(None)
    max_grad_norm: float | None = positive(None)
    normalize_observations: bool = False
    reward_scale: float = _number_field(1.0, lambda x: x != 0.0, "a number other than 0")
    reward_clip: float | None = positive(None)

    preprocess = functools.cached_property(preprocessing.of)

    @property
    def _is_weight(self) -> Any:
        """Whether parameters are weights: a prefix of their tree, of bools, or a function to it.

        Others (statistics, temperatures, multipliers) keep the agent's own optimizer, and no decay.
        """
        return True

    def __post_init__(self):
        check(self)
        if getattr(self, "normalize_rewards", False):
            require_one_player(self, "running returns of both would be mixed, bind reward_scale")
        if callable(self.optimizer):
            make(self, "optimizer", learning_rate=1.0)  # refuses its options


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Adam(Optimized):
    """Option of agents whose own optimizer is Adam.

    Attributes:
      adam_epsilon: Adam epsilon, outside of the root.
    """

    adam_epsilon: float = positive(1e-8, most=1e3)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Learning(Optimized):
    """Options of agents that learn from discounted returns.

    Attributes:
      gamma: discount.
    """

    gamma: float = fraction(0.99)


def expect(agent: Any, name: str, holds: bool, expected: str) -> None:
    """Raises a `UserError` that names the option `name` of an agent, unless `holds`.

    A traced value, of one member of a population, is not checked: the runner has checked it.
    """
    if not isinstance(getattr(agent, name), jax.core.Tracer) and not holds:
        option = f"{type(agent).__name__}.{name}"
        raise errors.UserError(f"{option}: expected {expected}, got {getattr(agent, name)!r}")


def make(agent: Any, name: str, *arguments: Any, **outputs: Any) -> Any:
    """Returns the part that an agent's option `name`, a class or a function, makes when called.

    The option, such as `network`, is annotated as `Callable[..., Kind]` or a union with it.

    Raises:
      errors.UserError: the call fails, or its result is of another kind; one line with the option,
        its value and the cause.
    """
    function = getattr(agent, name)
    option = f"{type(agent).__name__}.{name} = @{errors.path_of(function)}"
    errors.refuse_bound(function, *arguments, **outputs)
    try:
        part = function(*arguments, **outputs)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        frame = not isinstance(error, errors.UserError) and errors.innermost_frame(error)
        if frame and frame.filename != __file__:  # else the call itself does not fit
            option += f" (at {frame.filename}:{frame.lineno} in {frame.name})"
        raise errors.UserError(f"{option}: {errors.first_line(error)}") from error
    hint = typing.get_type_hints(type(agent))[name]
    makers = (hint, *typing.get_args(hint))  # itself, or one of a union
    kind = next(typing.get_args(x)[-1] for x in makers if typing.get_origin(x) is Callable)
    if not isinstance(part, kind):
        raise errors.UserError(f"{option}: expected a {kind.__name__}, got {errors.path_of(part)}")
    return part


def wrong_output(output: Any, expected: str) -> errors.UserError:
    """Returns the error of a network whose output `[B, ...]` is not the expected one."""
    got = f"shape {output.shape}" if hasattr(output, "shape") else errors.path_of(output)
    return errors.UserError(f"the option network: expected {expected} as its output, got {got}")


def require_feedforward(agent: Any, network: Any) -> None:
    """Raises a `UserError` if a network that an agent unrolls from any time step is recurrent."""
    if network.memory_length is None:
        raise errors.UserError(
            f"{type(agent).__name__} learns no recurrent network: expected one without a core "
            f"(where memory is needed, use R2D2 or PQN)"
        )


def require_one_player(agent: Any, cause: str) -> None:
    """Raises a `UserError` with the cause if the environment of an agent is a game of two."""
    if agent.spec.players != 1:
        raise errors.UserError(
            f"{type(agent).__name__}: {agent.spec.name} has two players: {cause}"
        )


def require_discrete(agent: Any, remedy: str = "use SAC or PPO") -> None:
    """Raises a `UserError` unless the environment of an agent takes one discrete action."""
    spec = agent.spec
    if not isinstance(spec.action, specs.DiscreteArray):
        raise errors.UserError(
            f"{type(agent).__name__} needs discrete actions, and those of {spec.name} are "
            f"{spec.action!r}: {remedy}, or wrappers.FlattenAction for a multi-discrete action"
        )
