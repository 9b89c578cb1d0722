"""User mistakes in agents and their parts: errors of one line that name the option."""

import functools
import math
import re
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from dm_env import specs

from agents import alphazero, dqn, impala, muzero, networks, ppo, pqn, r2d2, sac, vmpo
from agents.meta import rules
from agents.meta.lpg import rule as lpg_rule
from agents.meta.rules import disco
from agents.networks import cores, encoders, heads, layers, tables
from agents.networks import muzero as muzero_networks
from agents.networks import sac as sac_networks
from agents.parts import categorical, minibatches
from agents.replay import replay
from agents.search import proposals, tree_search
from environments import catch, pgx, probes, wrappers
from podracers import anakin, environment, errors, parallel, types
from tests import contract, streams
from tests.agents import experience
from tests.agents.meta.lpg import lifetimes

_SPEC = catch.Catch().spec
_SPECS = {"SAC": streams.RandomEpisodes().spec, "AlphaZero": wrappers.Searchable(catch.Catch).spec}
_AGENTS = (
    *(ppo.PPO, impala.IMPALA, vmpo.VMPO, dqn.DQN, pqn.PQN, r2d2.R2D2),
    *(sac.SAC, muzero.MuZero, alphazero.AlphaZero),
)
_PARTS = (tree_search.Search, heads.CategoricalReturn, categorical.Support)
_MAKE = {part.__name__: part for part in (*_AGENTS, *_PARTS)}
_MAKE |= {
    "LPG": lifetimes.agent,
    "LRU": functools.partial(cores.LRU, 4),
    "Stack": cores.Stack,
    "Attention": cores.Attention,
    "from_spec": heads.from_spec,
    "Proposal": functools.partial(proposals.Proposal, _SPEC.action),
    # Nothing may mix cells.
    "q_network": functools.partial(networks.q_network, _SPEC, 4, num_cells=4),
    "actor_critic": functools.partial(
        networks.actor_critic, _SPEC, heads.from_spec(_SPEC.action), num_cells=4
    ),
}
_bounded = functools.partial(specs.BoundedArray, (2,))
_BOX = _bounded(np.float32, -1.0, 1.0)
_CONTINUOUS, _MULTI_DISCRETE = (
    streams.RandomEpisodes(actions=actions).spec for actions in ("continuous", "multi_discrete")
)
_RECURRENT = functools.partial(networks.q_network, core=cores.LSTM(8))
_MODEL = functools.partial(muzero_networks.model, core=cores.LSTM(8))

_NAMES = [agent.__name__ for agent in _AGENTS]
_IMPOSSIBLE = [
    ("PPO", "epochs", 0),
    ("PPO", "gamma", 1.1),
    ("PPO", "gamma", "0.9"),
    ("PPO", "entropy_cost", math.nan),
    ("PPO", "learning_rate", None),
    ("PPO", "clip_epsilon_final", 0.1),  # without anneal_steps
    ("IMPALA", "max_grad_norm", math.inf),
    ("VMPO", "epsilon_kl", 0.0),
    ("VMPO", "target_period", 0),
    ("DQN", "target_period", 10**30),
    ("DQN", "max_grad_norm", 10**400),
    ("R2D2", "burn_in", 39),
    ("R2D2", "burn_in", -1),
    ("SAC", "target_entropy", 1.0),
    ("SAC", "random_shift", 4),  # without an image
    ("SAC", "sequence_length", 2),  # without a core
    ("SAC", "burn_in", 1),  # as long as the sequence
    ("SAC", "burn_in", -1),
    ("MuZero", "final_temperature", -1.0),
    ("Search", "max_depth", 0),
    ("Proposal", "num_actions", 1),
    ("Proposal", "uniform_fraction", 1.5),
    *((name, "reward_clip", 0.0) for name in _NAMES),
    *((name, "reward_scale", 0) for name in _NAMES),
    *((name, "learning_rate", 1e4) for name in _NAMES),
    ("PPO", "value_cost", -5.0),
    ("PPO", "entropy_cost", -1e300),
    ("PPO", "epochs", 2**31 - 1),
    ("IMPALA", "value_cost", -5.0),
    ("IMPALA", "optimizer_epsilon", 1e300),
    ("DQN", "replay_ratio", 1e30),
    ("SAC", "target_entropy", -1e39),
    ("SAC", "random_steps", -1),
    ("SAC", "weight_decay", 1e30),
    ("MuZero", "support", math.inf),
    ("MuZero", "support_atoms", 2),
]

_OPTIONS = [
    *((name, {option: value}, f"{name}.{option}: ") for name, option, value in _IMPOSSIBLE),
    ("IMPALA", {"optimizer": "rmspop"}, "did you mean 'rmsprop'"),
    ("Search", {"kind": "gumbal"}, "did you mean 'gumbel'"),
    *((name, {"spec": _CONTINUOUS}, "SAC") for name in ("DQN", "PQN", "R2D2")),
    ("MuZero", {"spec": _CONTINUOUS}, "bind MuZero.proposal = @proposals.Proposal"),
    ("MuZero", {"proposal": functools.partial(proposals.Proposal, head="tanh")}, "no action head"),
    ("DQN", {"spec": _MULTI_DISCRETE}, "PPO"),
    ("SAC", {"spec": _MULTI_DISCRETE}, "PPO or IMPALA"),
    ("SAC", {"spec": _CONTINUOUS, "target_entropy": 0.7}, "less than 0.693"),
    ("AlphaZero", {"spec": _SPEC}, "Searchable"),
    ("DQN", {"network": _RECURRENT}, "use R2D2"),
    ("R2D2", {"network": networks.q_network}, "has no core"),
    ("MuZero", {"network": _MODEL}, "recurrent"),
    ("LPG", {"updates": 0}, "LPG.updates"),
    ("LPG", {"agent_learning_rates": ()}, "LPG.agent_learning_rates"),
    ("LPG", {"agent_learning_rates": (0.0,)}, "LPG.agent_learning_rates: ... above 0"),
    ("LPG", {"chunk_length": 5}, "bind Lifetimes.period"),
    ("LPG", {"spec": _SPEC}, "got Catch"),
    ("LRU", {"min_radius": -0.1}, "LRU.min_radius: expected at least 0 and less than 0.999"),
    ("LRU", {"min_radius": 0.999}, "less than 0.999, got 0.999"),
    ("Stack", {"num_layers": 0}, "Stack.num_layers: expected a positive int"),
    ("Stack", {"hidden_size": 0}, "Stack.hidden_size: expected a positive int"),
    ("Attention", {"window": 0}, "Attention.window: expected a positive int"),
    ("Attention", {"num_heads": 3}, "num_heads: expected a divisor of size = 256, got 3"),
    ("Stack", {"core": encoders.MLP()}, "expected a core such as MinGRU, got ...MLP"),
    ("from_spec", {"action_spec": _BOX, "kind": "gausian"}, "did you mean 'gaussian'"),
    ("from_spec", {"action_spec": _SPEC.action, "kind": "gaussian"}, "known: categorical"),
    ("from_spec", {"action_spec": specs.Array((2,), np.float32)}, "supported are a Discr"),
    ("from_spec", {"action_spec": _bounded(np.float32, -np.inf, 1.0)}, "-inf to 1 ... finite"),
    ("from_spec", {"action_spec": _bounded(np.float32, -3e38, 3e38)}, "difference exceeds"),
    ("from_spec", {"action_spec": _bounded(np.float32, 2.0, 2.0)}, "leave it out"),
    ("from_spec", {"action_spec": _bounded(np.int32, 1, 3)}, "count from 0"),
    ("q_network", {"head_hidden_sizes": (8,)}, "no head_hidden_sizes"),
    ("q_network", {"core": cores.LSTM(8)}, "no core"),
    ("actor_critic", {"core": cores.GRU(8)}, "no core"),
    ("Support", {"bound": 0.0}, "positive bound"),
    ("CategoricalReturn", {"num_atoms": 1}, "2 atoms"),
    ("CategoricalReturn", {"minimum": 2.0, "maximum": 2.0}, "minimum < maximum"),
]


def _make(name, options):
    """Makes a part with these options, and an agent's spec."""
    return _MAKE[name](**({"spec": _SPECS.get(name, _SPEC)} if name in _NAMES else {}) | options)


_IMAGE, _LEAVES = np.zeros((1, 8, 8, 1)), {"places": np.zeros((1, 8)), "walls": np.zeros((1, 5))}
_MASK = np.ones((1, 3), bool)


def _encode(encoder, observation=_IMAGE):
    return jax.eval_shape(encoder.init, jax.random.key(0), observation)


def _one_hot(**options):
    return encoders.OneHot(encoders.MLP(), **options)


_MIXED = {
    "action_mask": specs.Array((3,), bool),
    "board": specs.Array((6, 5), np.float32),
    "inventory": {"count": specs.Array((), np.int32), "flags": specs.Array((3,), bool)},
}
_NUMBERS = {"seed": specs.DiscreteArray(2048), "place": {"number": specs.DiscreteArray(2049)}}
_HEAD = heads.from_spec(_SPEC.action)
_RULE = lpg_rule.Rule(hidden_size=8, prediction_size=5)
_OUTPUTS = _RULE.output_spec(3)


def _spec_of(observation):
    return environment.EnvironmentSpec("MIXED", observation, _SPEC.action)


def _keys(**options):
    return networks.actor_critic(_spec_of(_MIXED), _HEAD, **options)


def _sac_keys(**options):
    spec = _spec_of(_MIXED)
    return sac_networks.sac_network(spec, sac_networks.head_from_spec(spec), **options)


def _step(make):
    """Steps a network that observes numbers."""
    network = make(_spec_of(_NUMBERS))
    network.step({}, network.initial_core(1), networks.zero_timestep(_spec_of(_NUMBERS)))


def _replay(**options):
    timestep = types.TimeStep(*[np.zeros((5, 4), np.float32)] * 4)
    rollout = types.Rollout(timestep, np.zeros((4, 4), np.int32), (), ())
    buffer = replay.Replay(**{"sequence_length": 4, "batch_size": 8} | options)
    columns = jax.P(None, parallel.AXIS)
    layout = (types.Rollout(columns, columns, columns, jax.P()),)
    jax.eval_shape(experience.on_devices(buffer.init, 4, layout), rollout)


def _taught(rule=_RULE, **options):
    options = {"load": lambda path: (rule, None), "network": rules.rule_network} | options
    return rules.RuleAgent(probes.ActionReward().spec, **options)


def _of_two(game="tic_tac_toe", agent=ppo.PPO, network=None, **options):
    pytest.importorskip("pgx")
    return agent(pgx.Pgx(game).spec, network=network or contract.tiny_network(), **options).net


_ATOMS = {"agent": dqn.DQN, "distribution": heads.CategoricalReturn(-1.0, 2.0, 11)}
_BOARD = {"policy_keys": ("board",)}
_DEALT = {"item": np.zeros((6, 24))}
_LIVES = anakin.Anakin(lifetimes.agent(), lifetimes.candidate(), 4, 6, num_devices=1)
_PLAIN = SimpleNamespace(is_recurrent=False, memory_length=0)
_PRIORITIZED = replay.Replay(64, 4, 8, 0.6)

# Words of the message, and a call; "..." stands for anything.
MISTAKES = [
    *((words, functools.partial(_make, name, options)) for name, options, words in _OPTIONS),
    # Encoders and layers.
    ("Dense.features", lambda: _encode(encoders.MLP((8, 0)))),
    ("'relu'", lambda: _encode(encoders.MLP(activation="rellu"))),
    ("Conv.features", lambda: _encode(encoders.CNN((4, -1)))),
    ("Conv.kernel", lambda: _encode(encoders.CNN((4,), kernel=0))),
    ("Conv.stride", lambda: _encode(encoders.CNN((4,), strides=(0,)))),
    ("one stride for each", lambda: _encode(encoders.CNN((4, 4), strides=(1,)))),
    ("CNN.padding: expected 'SAME' or", lambda: _encode(encoders.CNN(padding="Valid"))),
    ("2 x 2, ... 4 x 4", lambda: _encode(encoders.CNN((4, 4, 4), kernel=4, padding="VALID"))),
    ("1 x 1, ... use encoders.CNN with", lambda: _encode(encoders.NatureCNN())),
    ("num_values: expected a positive", lambda: _encode(encoders.OneHot(encoders.MLP(), 0))),
    ("integers", lambda: _encode(tables.Table(3))),
    ("one image", lambda: _encode(encoders.OneHot(encoders.CNN(), 4), np.zeros((1, 8)))),
    ("leaves [items, ...]; ... [(8,), (5,)]", lambda: _encode(encoders.DeepSets(), _LEAVES)),
    ("no 'wals'...walls", lambda: _encode(_one_hot(ignored=("wals",)), _LEAVES)),
    ("places: ... no 'place'...'places", lambda: _encode(_one_hot(places=("place",)), _LEAVES)),
    ("'walls' to be integers", lambda: _encode(_one_hot(places=("walls",)), _LEAVES)),
    *(
        (
            f"CNN: ... axis {axis} ... [height, width, channels]",
            functools.partial(encoders.image_or_error, np.zeros((1, *shape), dtype), "CNN"),
        )
        for shape, axis in (((4, 84, 84), 0), ((3, 40, 32), 0), ((40, 16, 99), 1))
        for dtype in (np.uint8, np.float32)
    ),
    *(
        (words, functools.partial(_encode, part, observation))
        for encoder, words in (
            (encoders.MLP(), "no part that the encoder reads"),
            (encoders.SimBa(8, 1), "no part that the encoder reads"),
            (encoders.CNN(), "its shapes are"),
            (encoders.DeepSets(), "the shapes are"),
            (tables.Table(3), "integers, got"),
        )
        for part, observation in (
            *((encoder, x) for x in ({"action_mask": _MASK}, {}, np.zeros((1, 0)))),
            (encoders.OneHot(encoder, ignored=("y",)), {"x": {"y": _MASK}}),
        )
    ),
    ("4 cells do not divide", lambda: _encode(layers.Dense(8, num_cells=4), np.zeros((1, 13)))),
    ("4 cells do not divide", lambda: _encode(layers.Dense(9, num_cells=4), np.zeros((1, 12)))),
    ("MinGRU.chrono_steps: expected an int of at least", lambda: cores.MinGRU(4, 2)),
    ("MinGRU.chrono_steps: expected an int of at least", lambda: cores.MinGRU(4, 1.5)),
    # Networks.
    *(
        (
            "MIXED: observation['place']['number'] has 2,049 values...OneHot...Table",
            functools.partial(_step, make),
        )
        for make in (
            lambda spec: networks.actor_critic(spec, _HEAD),
            lambda spec: muzero_networks.model(spec, 4, 3).representation,
            lambda spec: muzero_networks.policy_value(spec, 4, 3),
            lambda spec: networks.q_network(spec, 4),
            lambda spec: rules.rule_network(spec, _OUTPUTS),
            lambda spec: sac_networks.sac_network(spec, sac_networks.head_from_spec(spec)).memory,
        )
    ),
    ("MIXED has no 'bord'; did you mean", lambda: _keys(critic_keys=("bord",))),
    ("; known: board, inventory", lambda: _keys(policy_keys=("action_mask",))),
    ("policy_keys: expected tuple[str, ...]", lambda: _keys(policy_keys="board")),
    ("separate_critic: expected True", lambda: _keys(**_BOARD, separate_critic=False)),
    ("critic_encoder: expected one that reads int", lambda: _keys(critic_encoder=_one_hot())),
    ("policy_keys: the observation of MIXED has", lambda: _sac_keys(policy_keys=("count",))),
    ("encoder: expected None, because", lambda: _sac_keys(**_BOARD, encoder=encoders.CNN((4,)))),
    ("core: expected None, because policy_keys", lambda: _sac_keys(**_BOARD, core=cores.GRU(8))),
    # Minibatches, replay and optimizers.
    ("4 ... the 6 steps ... 1, 2, 3, 6", lambda: minibatches.dealer(_PLAIN, _DEALT, (), 4)),
    (
        "minibatches = 5 ... the 24 environments ... 4, 6",
        lambda: minibatches.over_streams(_DEALT, np.arange(24), jax.random.key(0), 5),
    ),
    ("Replay.capacity: expected ... (up to 1073741823)", lambda: _replay(capacity=2**30)),
    ("replay_capacity = 31 ... needs at least 32", lambda: _replay(capacity=31)),
    ("over 4 learner devices: use 4 or 8", lambda: _replay(capacity=4000, batch_size=6)),
    ("min_replay = 40: expected at most", lambda: _replay(capacity=40, min_size=40)),
    ("LossOutput.priority ..., got None", lambda: _PRIORITIZED.update_priorities(*[None] * 3)),
    ("optimizer...a GradientTransformation", lambda: ppo.PPO(_SPEC, optimizer=lambda **_: 3)),
    ("scale_by_adam...'learning_rate'", lambda: ppo.PPO(_SPEC, optimizer=optax.scale_by_adam)),
    # Rules.
    ("no part 'predictions'; did you mean 'pred", lambda: _taught(costs={"predictions": 1.0})),
    ("a weight other than 0", lambda: _taught(costs={"prediction": 0.0, "policy": 0.0})),
    *(
        (words, functools.partial(_taught, disco.Disco(), network=network))
        for words, network in (
            ("'y' of shape", lambda spec, outputs: rules.rule_network(spec, _RULE.output_spec(2))),
            ("'policy' of shape (2,)", lambda spec, outputs: networks.q_network(spec, 2)),
            ("actor_critic: ...outputs", networks.actor_critic),
        )
    ),
    ("ROLLOUT_LENGTH", lambda: _LIVES.trace(0)),
    # Options that have no meaning for two players.
    ("tic_tac_toe...running returns of both would", lambda: _of_two(normalize_rewards=True)),
    ("distribution...minimum = -max", lambda: _of_two(network=networks.q_network, **_ATOMS)),
    *(
        (
            "kuhn_poker...a stream has both: expected a network without memory",
            functools.partial(_of_two, "kuhn_poker", network=network),
        )
        for network in (contract.tiny_network(cores.GRU(8)), contract.tiny_network(frame_stack=2))
    ),
]


@pytest.mark.parametrize(("words", "call"), MISTAKES)
def test_a_mistake_is_one_line(words, call):
    pattern = re.escape(words).replace(r"\.\.\.", ".*")
    with pytest.raises(errors.UserError, match=pattern) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("agent", [x for x in _AGENTS if "target_period" in x.__dataclass_fields__])
def test_target_parameters_are_older_by_default(agent):
    assert agent.target_period > 1 or agent.target_rate < 1.0


def _broken_network(mistake, spec, head):
    return mistake(spec, head)


@pytest.mark.parametrize(
    ("mistake", "cause"),
    [
        (lambda spec, head: spec + head, "unsupported"),
        (lambda spec, head: head.num_units, "no attribute 'num_units'"),
        (lambda spec, head: int("nine"), "nine"),
    ],
)
def test_a_mistake_in_a_network_names_its_line(mistake, cause):
    line = mistake.__code__.co_firstlineno
    message = rf"^PPO\.network = .*\(at .*test_messages\.py:{line} in <lambda>\): .*{cause}"
    network = functools.partial(_broken_network, mistake)
    with pytest.raises(errors.UserError, match=message):
        _ = ppo.PPO(catch.Catch().spec, network=network).net
