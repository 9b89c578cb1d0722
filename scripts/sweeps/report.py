"""Results of a study: a table, the best experiment as a .gin file, and pictures."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optuna
import optuna.visualization.matplotlib as pictures
from matplotlib import ticker

from podracers import errors
from podracers.checkpoints import storage
from podracers.commands import command_line
from podracers.scripts.results import plotting
from podracers.scripts.sweeps import space as space_lib
from podracers.scripts.sweeps import studies, trials

_ROWS = 10  # rows of the table


def write(study: optuna.Study, trainer: trials.Trainer) -> list[str]:
    """Writes `best.gin` and pictures into the study's folder; returns lines for the terminal.

    Raises:
      errors.RunFailure: all trials have failed.
    """
    ended = study.get_trials(deepcopy=False)
    complete = [trial for trial in ended if trial.state == optuna.trial.TrialState.COMPLETE]
    reasons = [studies.failure(trial) for trial in ended if studies.failure(trial)]
    counts = [
        f"{sum(t.state == s for t in ended)} {s.name.lower()}" for s in optuna.trial.TrialState
    ]
    lines = [", ".join(text for text in counts if not text.startswith("0 "))]
    lines += [f"{len(reasons)} refused or failed, the last: {reasons[-1]}"] if reasons else []
    if len(reasons) == len(ended) > 0:
        raise errors.RunFailure(f"all trials have failed, the last: {reasons[-1]}")
    if not complete:
        return lines
    lines.append(_table(study, complete))
    best = study.best_trial
    text = trainer.load(*space_lib.bindings(best.params)).text()
    note = f"# {study.study_name}, trial {best.number}: {trainer.objective} {best.value:g}\n"
    storage.write(trainer.folder / "best.gin", note + text)
    names = _draw(study, trainer.folder, trainer.objective, complete)
    return [*lines, f"{trainer.folder}: {', '.join(['best.gin', *names])}"]


def _table(study: optuna.Study, complete: Sequence[Any]) -> str:
    highest_first = study.direction == optuna.study.StudyDirection.MAXIMIZE
    rows = [("trial", "value", "settings", "run")]
    best_first = sorted(complete, key=lambda trial: trial.value, reverse=highest_first)
    for trial in best_first[:_ROWS]:
        texts = (f"{x:.4g}" if isinstance(x, float) else str(x) for x in trial.params.values())
        settings = ", ".join(map("{} = {}".format, trial.params, texts))
        place = trial.user_attrs.get("run", "")
        rows.append((str(trial.number), f"{trial.value:.6g}", settings, place))
    return command_line.table(rows)


def _draw(
    study: optuna.Study, folder: pathlib.Path, objective: str, complete: Sequence[Any]
) -> list[str]:
    """Draws pictures, and returns the names of their files."""
    makers: dict[str, Callable[[], Any]] = {
        "history.png": lambda: pictures.plot_optimization_history(study, target_name=objective)
    }
    if len({trial.value for trial in complete}) > 1:
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        makers["slices.png"] = lambda: pictures.plot_slice(study, target_name=objective)
        makers["importances.png"] = lambda: pictures.plot_param_importances(study, evaluator)
    for name, make in makers.items():
        figure = np.ravel(make())[0].figure
        figure.set_layout_engine("constrained")  # long names of options are not cut
        for axis in (axes.xaxis for axes in figure.axes if axes.get_xscale() == "log"):
            axis.set_major_locator(ticker.LogLocator(subs=(1.0, 3.0)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(ticker.NullFormatter())
        plotting.save(figure, folder / name)
    return [*makers]
