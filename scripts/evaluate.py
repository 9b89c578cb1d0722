"""Evaluates a run: python scripts/evaluate.py --run_dir DIR [--episodes 64] [--video FILE.gif]."""

import jax
import numpy as np

from podracers import (
    checkpoint,
    command_line,
    errors,
    evaluators,
    experiment,
    run_directory,
    video,
)


def main() -> int:
    """Parses the command line, evaluates, and prints the return."""
    parser = command_line.Parser(description=__doc__)
    parser.add_argument("--run_dir", required=True)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--video", metavar="FILE.gif", help="also record one episode")
    parser.add_argument("--seed", type=int, default=0, help="of the episodes")
    parser.add_argument(
        "--best", action="store_true", help="the best evaluated checkpoint, not the newest"
    )
    arguments = parser.parse_args()
    command_line.use_compilation_cache()

    directory = run_directory.RunDirectory(arguments.run_dir)
    directory.require()
    parts = experiment.load([str(directory.config)], []).build()
    if not 0 <= arguments.seed < 2**31:
        raise errors.UserError(f"--seed: expected 0 <= seed < 2**31, got {arguments.seed}")
    if arguments.video:
        video.require(parts.environment)
    step, params = _params(directory, parts, arguments.best)
    population = parts.runner.population
    evaluator = evaluators.make(
        parts.agent,
        parts.environment,
        arguments.episodes,
        population,
        parts.evaluator.max_steps,
    )
    key = jax.random.key(arguments.seed)
    episodes = evaluator.run(params, key)
    over = f"{population} members" if population > 1 else f"{arguments.episodes} episodes"
    print(
        f"step {step:,}: return {np.mean(episodes.returns):.2f} "
        f"± {episodes.standard_error():.2f} (mean and standard error over {over}), length "
        f"{np.mean(episodes.lengths):.1f} agent steps"
    )
    if population > 1:
        print("by member: " + ", ".join(f"{mean:.2f}" for mean in episodes.mean_return()))
    if arguments.video:
        member = params if population == 1 else jax.tree.map(lambda x: x[0], params)
        moments = evaluators.record(
            parts.agent, parts.environment, member, key, parts.evaluator.max_steps
        )
        video.save(parts.environment, moments, arguments.video)
        print(f"{arguments.video}: {len(moments)} frames")
    return 0


def _params(directory, parts: experiment.Parts, best: bool):
    """Returns the step and the acting parameters of a checkpoint, on the first device."""

    def member(key):
        return parts.agent.actor_params(parts.agent.init_learner(key))

    population = parts.runner.population
    keys = jax.random.split(jax.random.key(0), population)
    shapes = jax.eval_shape(jax.vmap(member) if population > 1 else lambda k: member(k[0]), keys)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    template = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes
    )
    checkpointer = checkpoint.Checkpointer(directory.checkpoints, read_only=True)
    restored = checkpointer.restore_params(template, best)
    if restored is None:
        raise errors.UserError(f"the run in '{directory.path}' has no checkpoint yet")
    return restored[0], restored[1]


if __name__ == "__main__":
    command_line.run(main)
