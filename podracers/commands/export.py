"""Exports a run's policy: podracers-export --run_dir DIR --out FILE [--format onnx] [--card].

The file acts as evaluations do, without this project: by JAX and flatbuffers, or by onnxruntime.
docs/export.md describes both forms, and has a loop.
"""

import argparse
import dataclasses
import functools
import importlib.util
from typing import Any

import jax

from podracers import agent as agent_lib
from podracers import errors, evaluation, parallel, trees
from podracers.checkpoints import storage
from podracers.commands import command_line
from podracers.exports import archive, cards, onnx_model
from podracers.exports import program as program_lib
from podracers.training import run_directory, summary, trained


def main() -> int:
    """Writes the file and its card, and uploads them, as the command line asks."""
    arguments = _arguments()
    is_onnx, out = arguments.format == "onnx", arguments.out
    command_line.use_compilation_cache()

    policy = trained.load(arguments.run_dir, arguments.best, arguments.member)
    agent = policy.parts.agent
    if is_onnx:
        agent = onnx_model.deterministic(agent)
    elif arguments.greedy:
        agent = agent_lib.greedy(agent) or agent
    params = jax.device_get(policy.params)  # constants of programs for any device
    spec, settings = policy.parts.environment.spec, policy.settings
    program = program_lib.Program(agent, params, spec, settings.precision)
    about: dict[str, Any] = {
        "environment": program.spec.name,
        "agent": errors.path_of(agent),
        "agent_steps": policy.step,
        "actions": program.actions,
        "batch_size": arguments.batch_size,
        "platforms": [] if is_onnx else arguments.platforms,
    }
    kept, data = (onnx_model.converted if is_onnx else archive.archived)(program, about)
    storage.write(out, data)
    names = ", ".join(["state", *trees.leaves(kept._replace(state={}))])
    runtime = ", ".join(about["platforms"]) or "onnxruntime"
    print(f"{out}: {parallel.readable_bytes(len(data))}, for {runtime}; reads {names}")
    if not (arguments.card or arguments.push):
        return 0

    evaluator = dataclasses.replace(policy.parts.evaluator, agent=agent)
    episodes = evaluator.run(policy.params, evaluation.run_key(settings.seed))
    directory = run_directory.RunDirectory(arguments.run_dir)
    has_ended = directory.summary.exists()
    provenance = directory.read_summary() if has_ended else summary.provenance()
    seed = settings.seed + (arguments.member or 0)
    card = cards.card(out.name, about, provenance, seed, episodes)
    path = out.with_name(f"{out.name}.md")
    storage.write(path, card)
    print(f"{path}: return {episodes.returns.mean():.2f} ± {episodes.standard_error():.2f}")
    if arguments.push:
        print(cards.push(arguments.push, out, card))
    return 0


def _arguments() -> argparse.Namespace:
    """Returns the checked options; `platforms` is a list."""
    parser = command_line.Parser(description=__doc__)
    add = parser.add_argument
    add("--run_dir", required=True)
    add("--out", type=command_line.output_file, required=True, metavar="FILE")
    help_text = "onnx: greedy actions, for onnxruntime (default: jax)"
    add("--format", choices=("jax", "onnx"), default="jax", help=help_text)
    add("--best", action="store_true", help="the best evaluated checkpoint, not the newest")
    add("--greedy", action="store_true", help="the most probable action, where evaluations sample")
    add("--member", type=int, metavar="I", help="of a population, from 0")
    default = "cpu,cuda,tpu"
    add("--platforms", default=default, metavar="NAMES", help=f"of jax; default: {default}")
    help_text = "a fixed number of streams (default: any number)"
    add("--batch_size", type=command_line.count, metavar="N", help=help_text)
    add("--card", action="store_true", help="evaluate, and write FILE.md, a model card")
    add("--push", metavar="NAME", help="upload file and card to a model of the Hugging Face hub")
    arguments = parser.parse_args()
    arguments.platforms = [*dict.fromkeys(arguments.platforms.split(","))]
    if unknown := {*arguments.platforms} - {*archive.PLATFORMS}:
        expected = f"some of {','.join(archive.PLATFORMS)}"
        raise errors.UserError(f"--platforms: expected {expected}, got '{min(unknown)}'")
    # Newer versions of jax2onnx need an older orbax-checkpoint.
    packages = {"jax": ["flatbuffers"], "onnx": ["jax2onnx<0.14", "onnxruntime"]}[arguments.format]
    for package in packages + ["huggingface_hub"] * bool(arguments.push):
        name = package.partition("<")[0]
        if importlib.util.find_spec(name) is None:
            message = f"podracers-export needs the package {name}: pip install '{package}'"
            raise errors.UserError(message)
    if arguments.push:
        cards.require_login(arguments.push)
    return arguments


command = functools.partial(command_line.run, main)
