"""Derivation of all keys from the key of a run, the same under every runner.

All keys are folded from it by global numbers (of the stream, the update, the step), never by a
device, a thread or an index in a batch.

Axis legend: `B` streams.
"""

import jax

_SETTINGS = (
    *("jax_default_prng_impl", "jax_threefry_partitionable", "jax_random_seed_offset"),
    "jax_high_dynamic_range_gumbel",  # sampling of categories
)
_STREAMS, _LEARNER, _RUN, _RESTART, _EVOLUTION = range(5)


def generator() -> dict[str, bool | int | str]:
    """Returns the settings of JAX that decide the random numbers of every key."""
    return {name: getattr(jax.config, name) for name in _SETTINGS}


def learner(key: jax.Array) -> jax.Array:
    """Returns the key to initialise the learner with."""
    return jax.random.fold_in(key, _LEARNER)


def streams(key: jax.Array, update: int = 0) -> jax.Array:
    """Returns the key from which the keys of the streams that begin after `update` are folded.

    Simulators that restart with a resumed run play other episodes.
    """
    if update == 0:
        return jax.random.fold_in(key, _STREAMS)
    return jax.random.fold_in(jax.random.fold_in(key, _RESTART), update)


def act_and_learn(key: jax.Array, update: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Returns the keys of acting and of learning in one update."""
    act_key, learn_key = jax.random.split(jax.random.fold_in(jax.random.fold_in(key, _RUN), update))
    return act_key, learn_key


def evolution(key: jax.Array, update: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Returns the keys of exploiting and of exploring after `update`, from the first member's."""
    exploit_key, explore_key = jax.random.split(
        jax.random.fold_in(jax.random.fold_in(key, _EVOLUTION), update)
    )
    return exploit_key, explore_key


def per_stream(key: jax.Array, env_id: jax.Array) -> jax.Array:
    """Returns the keys `[B]` of the streams, from a key that is equal for all of them."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, env_id)


def at_time(stream_keys: jax.Array, time: jax.Array | int) -> jax.Array:
    """Returns the acting keys `[B]` of one step, from the keys of the streams."""
    return jax.vmap(jax.random.fold_in, (0, None))(stream_keys, time)
