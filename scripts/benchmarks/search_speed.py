"""How many decisions a second MuZero's search takes, by simulations and by batch."""

import functools

import jax
import jax.numpy as jnp
from benchmarks import measure, records

from agents import muzero, networks, tree_search
from environments import catch

_DECISIONS = records.Kind("speed", "decisions/s", records.HIGHER, 0)
_CALLS = 10  # of each turn
_SIMULATIONS = (4, 16, 64)
_BATCHES = (8, 32, 128)


def _turn(simulations: int, batch: int) -> measure.Turn:
    """Returns a turn whose result is decisions per second."""
    search = functools.partial(tree_search.Search, num_simulations=simulations)
    agent = muzero.MuZero(catch.Catch().spec, search=search)
    params = agent.actor_params(jax.jit(agent.init_learner)(jax.random.key(0)))
    row = networks.zero_timestep(agent.spec)
    timestep = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), batch, axis=0), row)
    core = agent.init_actor(jnp.arange(batch), batch)
    keys = jax.random.split(jax.random.key(0), batch)
    act = jax.jit(lambda *arguments: agent.act(*arguments)[0])
    jax.block_until_ready(act(params, core, timestep, keys))

    def decide() -> None:
        for _ in range(_CALLS):
            jax.block_until_ready(act(params, core, timestep, keys))

    return lambda: measure.rate(decide, _CALLS * batch)


def benchmark_search(repeats: int) -> records.Result:
    """Measures Gumbel MuZero on Catch: latent 64, dense layers of 128."""
    turns = {(count, batch): _turn(count, batch) for count in _SIMULATIONS for batch in _BATCHES}
    rates = measure.take_turns(turns, repeats)
    return records.Result(
        "How many decisions a second Gumbel MuZero's search takes on Catch: latent 64, dense "
        "layers of 128.",
        tuple(
            _DECISIONS.row(own, simulations=count, batch=batch)
            for (count, batch), own in rates.items()
        ),
    )
