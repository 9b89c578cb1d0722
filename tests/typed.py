"""Parts that `make types` compares with their protocols; nothing here runs.

gin builds parts from names, so no other code shows the checker that they fit.
"""

from agents import alphazero, dqn, impala, muzero, ppo, pqn, r2d2, sac, vmpo
from agents.meta.lpg import meta_training
from agents.meta.lpg import rule as lpg_rule
from agents.meta.rules import agent as rule_agent
from agents.meta.rules import disco, interface
from environments import (
    brax,
    cartpole,
    catch,
    craftax,
    envpool,
    gridworld,
    gymnasium,
    gymnax,
    jaxmarl,
    jumanji,
    pendulum,
    playground,
    probes,
    wrappers,
    xminigrid,
)
from environments.meta import delayed_chains, lifetimes, tabular_grids
from podracers import agent, anakin, environment, evaluation, runner, sebulba, tasks


def agents(spec: environment.EnvironmentSpec) -> list[agent.Agent]:
    return [
        *(alphazero.AlphaZero(spec), dqn.DQN(spec), impala.IMPALA(spec), muzero.MuZero(spec)),
        *(pqn.PQN(spec), ppo.PPO(spec), r2d2.R2D2(spec), sac.SAC(spec), vmpo.VMPO(spec)),
        *(meta_training.LPG(spec), rule_agent.RuleAgent(spec, load=disco.load)),
    ]


def policies(spec: environment.EnvironmentSpec) -> list[agent.Policy]:
    return [*agents(spec), evaluation.UniformPolicy(spec)]


def environments() -> list[environment.Environment]:
    families: list[tasks.TaskFamily] = [
        *(delayed_chains.DelayedChains(), tabular_grids.TabularGrids()),
        lifetimes.Mixture((tabular_grids.TabularGrids,)),
    ]
    return [
        *(cartpole.CartPole(), catch.Catch(), gridworld.GridWorld(), pendulum.Pendulum()),
        *(probes.TwoAgents(), jaxmarl.JaxMARL("MPE_simple_spread_v3")),
        *(probes.Bandit(), wrappers.TimeLimit(catch.Catch), wrappers.Searchable(catch.Catch)),
        *(brax.Brax("ant"), gymnax.Gymnax("CartPole-v1"), jumanji.Jumanji("Snake-v1")),
        playground.Playground("PointMass"),
        *(craftax.Craftax("Craftax-Symbolic-v1"), xminigrid.XMiniGrid("MiniGrid-DoorKey-8x8")),
        *(lifetimes.Lifetimes(family) for family in families),
    ]


def simulators() -> list[environment.HostEnvironmentFactory]:
    return [envpool.EnvPool("Pong-v5"), gymnasium.Gymnasium("CartPole-v1")]


def runners(candidate: agent.Agent, simulator: environment.AnyEnvironment) -> list[runner.Runner]:
    return [
        anakin.Anakin(candidate, catch.Catch(), num_envs=1, rollout_length=1),
        sebulba.Sebulba(candidate, simulator, num_envs=1, rollout_length=1),
    ]


def rules() -> list[interface.Rule]:
    return [disco.Disco(), lpg_rule.Rule()]
