"""Evaluates a run: podracers-evaluate --run_dir DIR [--episodes N] [--video FILE.gif].

For the last checkpoint of a finished run it prints the returns of `summary.json`; any other
checkpoint plays the same episodes. If evaluations sample from the policy, it also prints the return
of greedy actions.
"""

import dataclasses
import functools

import numpy as np

from podracers import evaluation, video
from podracers.commands import command_line
from podracers.training import trained


def main() -> int:
    """Parses the command line, evaluates, and prints the return."""
    parser = command_line.Parser(description=__doc__)
    add = parser.add_argument
    add("--run_dir", required=True)
    add("--episodes", type=command_line.count, help="default: as many as in training")
    record = "also record one episode"
    add("--video", type=command_line.output_file, metavar="FILE.gif", help=record)
    add("--seed", type=int, help="of the episodes (default: the seed of the run)")
    add("--best", action="store_true", help="the best evaluated checkpoint, not the newest")
    arguments = parser.parse_args()
    if arguments.video:
        video.require_gif(arguments.video)
    command_line.use_compilation_cache()

    policy = trained.load_all(arguments.run_dir, arguments.best)
    settings, params = policy.settings, policy.params
    if arguments.seed is not None:
        settings = dataclasses.replace(settings, seed=arguments.seed)
    if (count := arguments.episodes) is not None:
        # An experiment without greedy episodes stays without them.
        greedy = settings.greedy_evaluation_episodes and count
        settings = dataclasses.replace(
            settings, evaluation_episodes=count, greedy_evaluation_episodes=greedy
        )
    parts = settings.build()
    if arguments.video:
        video.drawable(parts.environment)
    key = evaluation.run_key(settings.seed)
    results = parts.evaluate(params, key)
    print(f"step {policy.step:,}: {_described(results.episodes)}")
    if results.greedy is not None:
        print(f"greedy: {_described(results.greedy)}")
    if arguments.video:
        frames = parts.evaluator.film(params, key)
        video.save(frames, arguments.video)
        print(f"{arguments.video}: {len(frames)} frames")
    return 0


def _described(episodes: evaluation.Episodes) -> str:
    """Returns the means over episodes, and the return of each member."""
    mean = episodes.mean_return()
    over = f"{mean.size} members" if mean.ndim else f"{episodes.returns.size} episodes"
    by_member = ", by member: " + ", ".join(f"{x:.2f}" for x in mean) if mean.ndim else ""
    single = {name: values for name, values in episodes.metrics.items() if "/" not in name}
    metrics = "".join(f", {name} {np.mean(values):.4g}" for name, values in single.items())
    return (
        f"return {np.mean(episodes.returns):.2f} ± {episodes.standard_error():.2f} (mean and "
        f"standard error over {over}), length {np.mean(episodes.lengths):.1f} agent steps"
        f"{metrics}{by_member}"
    )


command = functools.partial(command_line.run, main)
