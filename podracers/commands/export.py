"""Exports a run's policy: podracers-export --run_dir DIR --out FILE.

The file needs JAX and flatbuffers, and nothing of this project. It is a zip archive with
`policy.json`, a description, and two programs (`jax.export`) for each platform, whose parameters
are constants:

  PLATFORM/initial   state = initial(seed)
  PLATFORM/act       action, state = act(state, observation, first[, reward])

They act as evaluations do. docs/export.md has a loop.
"""

import dataclasses
import functools
import importlib.util
import io
import json
import pathlib
import zipfile
from typing import Any, NamedTuple

import jax
import jax.export
import jax.extend
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from podracers import agent as agent_lib
from podracers import environment, errors, parallel, precision, trees, types
from podracers.commands import command_line
from podracers.training import summary, trained

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")  # names of `jax.export`


def main() -> int:
    """Parses the command line, and writes the file."""
    parser = command_line.Parser(description=__doc__)
    add = parser.add_argument
    add("--run_dir", required=True)
    add("--out", type=command_line.output_file, required=True, metavar="FILE")
    add("--best", action="store_true", help="the best evaluated checkpoint, not the newest")
    add("--greedy", action="store_true", help="the most probable action, where evaluations sample")
    add("--member", type=int, metavar="I", help="of a population, from 0")
    default = "cpu,cuda,tpu"
    add("--platforms", default=default, metavar="NAMES", help=f"default: {default}")
    help_text = "a fixed number of streams (default: any number)"
    add("--batch_size", type=command_line.count, metavar="N", help=help_text)
    arguments = parser.parse_args()
    platforms = [*dict.fromkeys(arguments.platforms.split(","))]
    if unknown := {*platforms} - {*_PLATFORMS}:
        expected = f"some of {','.join(_PLATFORMS)}"
        raise errors.UserError(f"--platforms: expected {expected}, got '{min(unknown)}'")
    if importlib.util.find_spec("flatbuffers") is None:
        message = "podracers-export needs the package flatbuffers: pip install flatbuffers"
        raise errors.UserError(message)
    command_line.use_compilation_cache()

    policy = trained.load(arguments.run_dir, arguments.best, arguments.member)
    agent = policy.parts.agent
    params = jax.device_get(policy.params)  # constants of programs for any device
    if arguments.greedy:
        agent = agent_lib.greedy(agent) or agent
    program = Program(agent, params, policy.parts.environment.spec, policy.settings.precision)
    about: dict[str, Any] = {
        "environment": program.spec.name,
        "agent": errors.path_of(agent),
        "agent_steps": policy.step,
        "actions": "greedy" if agent_lib.greedy(agent) is None else "sampled",
        "batch_size": arguments.batch_size,
        "platforms": platforms,
    }
    _write(program, about, arguments.out)
    return 0


class Arguments(NamedTuple):
    """The arguments of an exported `act`, leaves `[B, ...]`."""

    state: dict[str, Any]  # state of `initial`, or of the last call
    observation: types.PyTree  # the parts that actions depend on
    first: Any  # bool, whether an episode begins
    reward: Any = None  # float32, since the last action; None if actions do not depend on it


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A policy as functions of arrays and dicts of arrays.

    Axis legend: `B` streams.
    """

    agent: agent_lib.Policy
    params: types.PyTree
    spec: environment.EnvironmentSpec
    precision: precision.Precision

    def initial(self, seed: jax.Array) -> dict[str, jax.Array]:
        """Returns the state of the streams of seeds `[B]` uint32, its leaves by name."""
        env_id = jnp.arange(seed.shape[0], dtype=jnp.int32)
        key = jax.random.key_data(jax.vmap(jax.random.key)(seed))
        actor_state = self.agent.init_actor(env_id, seed.shape[0], True)
        return trees.leaves({"actor": actor_state, "key": key})

    def act(self, arguments: Arguments) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the actions `[B, ...]` of the environment, and the state after them."""
        state, observation, first, reward = arguments
        keys = jax.vmap(jax.random.split)(jax.random.wrap_key_data(state["key"]))  # [B, 2]
        step_type = jnp.where(first, types.FIRST, types.MID).astype(jnp.int8)
        timestep = types.TimeStep(observation, reward, jnp.ones_like(reward), step_type)
        template = jax.eval_shape(lambda: self.agent.init_actor(jnp.arange(1), 1, True))
        actor_state = jax.tree_util.tree_map_with_path(
            lambda path, _: state[trees.name((jax.tree_util.DictKey("actor"), *path))], template
        )
        # A barrier keeps XLA from folding constants, which rounds otherwise than the agent does.
        params = jax.tree.map(jax.lax.optimization_barrier, self.params)
        with self.precision.tracing():
            action, actor_state, _ = self.agent.act(
                params, actor_state, timestep, keys[:, 1], evaluation=True
            )
        return action, trees.leaves({"actor": actor_state, "key": jax.random.key_data(keys[:, 0])})

    def shapes(self, batch_size: Any) -> Arguments:
        """Returns the shapes and dtypes of all arguments; the size may be symbolic."""
        seed = jax.ShapeDtypeStruct((batch_size,), jnp.uint32)
        timestep = self.spec.timesteps(batch_size)
        first = jax.ShapeDtypeStruct((batch_size,), jnp.bool_)
        state = jax.eval_shape(self.initial, seed)
        return Arguments(state, timestep.observation, first, timestep.reward)

    @functools.cached_property
    def _needed(self) -> set[str]:
        """Names of the leaves of `Arguments` that actions depend on, at once or later."""
        shapes = self.shapes(1)
        names = [*trees.leaves(shapes)]

        def act(*arguments: Any) -> dict[str, Any]:
            return dict(zip(("action", "state"), self.act(Arguments(*arguments))))

        jaxpr, outputs = jax.make_jaxpr(act, return_shape=True)(*shapes)

        def chosen(indices: list[int], *leaves: jax.Array) -> list[jax.Array]:
            values = jax.extend.core.jaxpr_as_fun(jaxpr)(*leaves)
            return [values[index] for index in indices]

        needed, before = {"action"}, set[str]()
        while needed != before:  # a part of the state may depend on further ones
            indices = [index for index, name in enumerate(trees.leaves(outputs)) if name in needed]
            program = jax.jit(functools.partial(chosen, indices))
            exported = jax.export.export(program)(*jax.tree.leaves(shapes))
            before = needed
            needed = needed | {names[index] for index in exported.module_kept_var_idx}
        return needed

    def export(
        self, platform: str, batch_size: int | None
    ) -> tuple[Arguments, jax.export.Exported, jax.export.Exported]:
        """Returns the shapes of the arguments of `act`, then `initial` and `act`.

        `platform` is one of `_PLATFORMS`; a `batch_size` of None leaves it open.
        """
        target = "gpu" if platform in ("cuda", "rocm") else platform
        with parallel.compiling_for(target):
            size = batch_size or jax.export.symbolic_shape("b")[0]
            shapes = self.shapes(size)
            read = jax.tree_util.tree_map_with_path(
                lambda path, x: x if trees.name(path) in self._needed else None, shapes
            )
            kept = Arguments(*map(_without_empty, read))._replace(first=shapes.first)
            if isinstance(kept.observation, dict) and environment.STATE in kept.observation:
                raise errors.UserError(
                    f"{errors.path_of(self.agent)} searches in the environment, from whose state "
                    "it acts: expected an agent that acts by observations"
                )

            def act(*arguments: Any) -> Any:
                named = trees.leaves(Arguments(*arguments))
                filled = jax.tree_util.tree_map_with_path(
                    lambda path, x: named.get(trees.name(path), jnp.zeros(x.shape, x.dtype)), shapes
                )
                action, state = self.act(filled)
                return action, {name: state[name] for name in kept.state}

            def initial(seed: jax.Array) -> dict[str, jax.Array]:
                state = self.initial(seed)
                return {name: state[name] for name in kept.state}

            export = functools.partial(jax.export.export, platforms=[platform])
            seed = jax.ShapeDtypeStruct(shapes.first.shape, jnp.uint32)
            arguments = kept if kept.reward is not None else kept[:-1]
            try:
                return kept, export(jax.jit(initial))(seed), export(jax.jit(act))(*arguments)
            except Exception as error:
                if batch_size is not None:
                    raise
                raise errors.UserError(
                    "the policy cannot be exported with an open batch dimension; fix it by "
                    f"--batch_size: {errors.one_line(error)}"
                ) from error


def _without_empty(tree: types.PyTree) -> types.PyTree:
    """Returns nested dicts without the parts that have no leaves."""
    if not isinstance(tree, dict):
        return tree
    return {key: _without_empty(part) for key, part in tree.items() if jax.tree.leaves(part)}


def _described(spec: specs.Array) -> dict[str, Any]:
    """Returns the shape, the dtype and the finite bounds of an array."""
    about: dict[str, Any] = {"shape": [*spec.shape], "dtype": str(np.dtype(spec.dtype))}
    if isinstance(spec, specs.BoundedArray):
        for name, bound in (("minimum", spec.minimum), ("maximum", spec.maximum)):
            if np.isfinite(bound).all():
                values = np.unique(bound)
                about[name] = values.item() if values.size == 1 else bound.tolist()
    return about


def _write(program: Program, about: dict[str, Any], out: pathlib.Path) -> None:
    """Writes the file, with the programs of all platforms, and prints its size and inputs."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for platform in about["platforms"]:
            kept, initial, act = program.export(platform, about["batch_size"])
            file.writestr(f"{platform}/initial", initial.serialize())
            file.writestr(f"{platform}/act", act.serialize())
        parts = trees.leaves(program.spec.observation)
        about["observation"] = jax.tree_util.tree_map_with_path(
            lambda path, _: _described(parts[trees.name(path)]), kept.observation
        )
        about |= {
            "action": _described(program.spec.action),
            "reads_reward": kept.reward is not None,
            "reads_seed": "key" in kept.state,
        }
        provenance = summary.provenance()
        about |= {name: provenance[name] for name in ("versions", "commit")}
        file.writestr("policy.json", json.dumps(about, indent=2))
    with errors.file_errors(f"write '{out}'"):
        out.write_bytes(archive.getvalue())
    arguments = ["state", *trees.leaves({"observation": kept.observation}), "first"]
    arguments += ["reward"] if about["reads_reward"] else []
    size = parallel.readable_bytes(out.stat().st_size)
    print(f"{out}: {size}, for {', '.join(about['platforms'])}; reads {', '.join(arguments)}")


command = functools.partial(command_line.run, main)
