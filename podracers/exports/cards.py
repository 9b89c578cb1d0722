"""Model cards in the form of the Hugging Face hub, and uploads to it.

The form: https://huggingface.co/docs/hub/model-cards, with a `model-index`.
"""

import importlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from podracers import errors, evaluation

_CARD = """---
library_name: podracers
pipeline_tag: reinforcement-learning
tags: [reinforcement-learning, {form}, {task}]
model-index:
- name: {name}
  results:
  - task: {{type: reinforcement-learning, name: reinforcement-learning}}
    dataset: {{name: {task}, type: {task}}}
    metrics:
    - {{type: mean_reward, name: mean_reward, value: {mean:.6g}}}
---

# {environment} by {agent}

- Return: {mean:.2f} ± {error:.2f}, mean and standard error over {episodes} episodes of
  {actions} actions
- Training: seed {seed}, {agent_steps:,} agent steps, on {device}
- Commit: {commit}
- Versions: {versions}

`policy.json` in the file has shapes and bounds; docs/export.md of the project has a loop.

```python
{load}```
"""
_LOADS = {
    "jax": """\
import zipfile
from jax import export
act = export.deserialize(zipfile.ZipFile("{file}").read("{platform}/act")).call
""",
    "onnx": """\
import onnxruntime
session = onnxruntime.InferenceSession("{file}")
print([(x.name, x.shape, x.type) for x in [*session.get_inputs(), *session.get_outputs()]])
""",
}


def card(
    file: str,
    about: Mapping[str, Any],
    provenance: Mapping[str, Any],
    seed: int,
    episodes: evaluation.Episodes,
) -> str:
    """Returns the card of a file.

    Args:
      file: its name.
      about: the beginning of its `policy.json`.
      provenance: of the run; `summary.provenance()` has the names.
      seed: of the run, or of the member.
      episodes: of the exported policy, of one member.
    """
    form = "jax" if about["platforms"] else "onnx"
    platform = (about["platforms"] or [""])[0]
    return _CARD.format(
        **about,
        commit=provenance["commit"],
        device=provenance["device"],
        versions=", ".join(f"{name} {x}" for name, x in provenance["versions"].items()),
        form=form,
        load=_LOADS[form].format(file=file, platform=platform),
        task=json.dumps(about["environment"]),
        name=json.dumps(file),
        mean=episodes.returns.mean(),
        error=episodes.standard_error(),
        episodes=episodes.returns.size,
        seed=seed,
    )


def require_login(name: str) -> None:
    """Raises `errors.UserError` unless `push` has a name that the hub allows, and a token."""
    utils = importlib.import_module("huggingface_hub.utils")  # optional
    try:
        utils.validate_repo_id(name)
    except utils.HFValidationError as error:
        raise errors.UserError(f"--push: {errors.first_line(error)}") from error
    if utils.get_token() is None:
        raise errors.UserError("--push: no token: set HF_TOKEN, or run `hf auth login`")


def push(name: str, file: pathlib.Path, text: str) -> str:
    """Uploads a file and its card in one commit, and returns the address of the model.

    Raises:
      errors.RunFailure: the hub cannot be reached, or refuses.
    """
    huggingface_hub = importlib.import_module("huggingface_hub")  # optional
    contents = {file.name: str(file), "README.md": text.encode()}
    files = [huggingface_hub.CommitOperationAdd(*pair) for pair in contents.items()]
    hub = huggingface_hub.HfApi()
    try:
        hub.create_repo(name, exist_ok=True)
        hub.create_commit(name, files, commit_message=f"{file.name} by podracers-export")
    except Exception as error:
        raise errors.RunFailure(f"--push {name}: {errors.one_line(error)}") from error
    return f"{hub.endpoint}/{name}"
