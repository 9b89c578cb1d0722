"""Neural networks: encoders, recurrent cores, action heads and their composition."""

from agents.networks.network import (
    ActorCriticModule,
    ActorCriticOutput,
    Composed,
    Core,
    Network,
    Torso,
    actor_critic,
    last_output,
    unroll_after,
    unroll_in_parts,
    zero_timestep,
)
from agents.networks.q_values import QModule, q_network

__all__ = [
    "ActorCriticModule",
    "ActorCriticOutput",
    "Composed",
    "Core",
    "Network",
    "QModule",
    "Torso",
    "actor_critic",
    "last_output",
    "q_network",
    "unroll_after",
    "unroll_in_parts",
    "zero_timestep",
]
